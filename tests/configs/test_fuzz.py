"""Whatever stands in a run file, loading ends in a run that plans or in named problems."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.diagnosis import known_names
from configs.load import LoadedRun, load_run
from configs.plan import Plan, make_plan
from configs.problems import RunFileError
from configs.run import RunSpec
from tests.configs.conftest import BASE

SECTIONS = [name for name in known_names(()) if known_names((name,))]
VALUES = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e9]),
    st.booleans(),
    st.sampled_from(
        [
            *("grpo", "opd", "dapo", "gspo", "reinforce", "behaviour", "sglang", "megatron"),
            *("k3", "token", "laptop", "beaker", "ray", "ai2/jupiter", "flash_4", "background"),
            *("4h", "1 GiB", "", "x", "a.b:c", "http://x", "/abs", "rel", "~", "cosine"),
        ]
    ),
    st.lists(st.sampled_from(["/a", "x:/b", "http://x", 1]), max_size=2),
    st.dictionaries(st.sampled_from(["A", "RANK", "a", "url"]), st.just("b"), max_size=2),
)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@st.composite
def set_options(draw: st.DrawFn) -> list[str]:
    options: list[str] = []
    for _ in range(draw(st.integers(0, 7))):
        section = draw(st.sampled_from(SECTIONS))
        name = draw(st.sampled_from(known_names((section,))))
        options.append(f"{section}.{name} = {_toml(draw(VALUES))}")
    return options


def _load(path: Path, options: list[str]) -> LoadedRun | RunFileError:
    try:
        return load_run(path, options)
    except RunFileError as error:
        return error


@given(set_options())
@settings(max_examples=400)
def test_a_run_or_problems(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(BASE)
        loaded = _load(path, options)
    if isinstance(loaded, RunFileError):
        assert loaded.problems
        assert all(problem.message for problem in loaded.problems)
        json.dumps([problem.as_json() for problem in loaded.problems])
        return
    plan = make_plan(loaded)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert RunSpec.model_validate(plan.spec) == loaded.spec
    assert plan.topology.trainer_ranks >= 1
    assert plan.topology.idle_gpus == 0 or plan.warnings


@given(st.text(max_size=60) | st.text("[]{}=.\"'\n# ab1", max_size=40))
@settings(max_examples=200)
def test_other_text_is_problems(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        result = _load(path, [])
    assert isinstance(result, RunFileError)
    assert result.problems
