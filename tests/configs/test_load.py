from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_run, parse_set
from configs.problems import Problem, RunFileError, edit_distance, nearest_name
from configs.run import RunSpec
from tests.configs.conftest import BASE, Load, Refuse, Write


def problems_of(path: Path) -> dict[str, Problem]:
    with pytest.raises(RunFileError) as caught:
        load_run(path)
    return {problem.field: problem for problem in caught.value.problems}


def test_all_problems_in_one_go_with_their_lines(write: Write) -> None:
    path = write(
        """\
name = "x"
seeed = 1
[model]
recipe = "laptop"
tokenizer = "~/x"
[data]
recipe = "laptop"
[core]
lr = "1"
los = "dapo"
loss = "dapoo"
max_run_seconds = 0
[rollout]
temperature = 0
engine_args = { a = [1] }
[launch]
memory = "3 GB"
[reward]
verifier = "maths"
"""
    )
    found = problems_of(path)
    lines = {field: problem.line for field, problem in found.items()}
    assert lines == {
        "seeed": 2,
        "model.tokenizer": 5,
        "core.lr": 9,
        "core.los": 10,
        "core.loss": 11,
        "core.max_run_seconds": 12,
        "rollout.temperature": 14,
        "rollout.engine_args.a": 15,
        "launch.memory": 17,
        "reward.verifier": 19,
        "output": None,
    }
    assert found["seeed"].nearest == "seed"
    assert found["core.los"].nearest == "loss"
    assert found["core.loss"].nearest == "dapo"
    assert found["reward.verifier"].nearest == "math"
    assert found["core.lr"].value == '"1"'
    assert found["core.lr"].allowed == "a number"
    assert all(problem.file == str(path) for problem in found.values())


def test_problems_name_the_section_of_a_nested_key(write: Write) -> None:
    found = problems_of(write(BASE + '[evaluation.sets.x]\nrecipe = "laptop"\nsample = 2\n'))
    assert found["evaluation.sets.x.sample"].nearest == "samples"
    assert found["evaluation.sets.x.sample"].line == 16


@pytest.mark.parametrize("value", ["1.0", '"1"', "true", "[1]", "{ a = 1 }", "1979-05-27"])
def test_wrong_types_are_refused_not_converted(write: Write, value: str) -> None:
    found = problems_of(write(BASE + f"[session]\nretries = {value}\n"))
    assert found["session.retries"].message == "wrong type"
    assert found["session.retries"].allowed == "an integer"


def test_an_integer_is_a_number(load: Load) -> None:
    assert load("core.lr = 1").spec.core.lr == 1.0


def test_a_section_that_is_no_table(write: Write) -> None:
    assert problems_of(write('core = 3\nname = "x"\n' + BASE.split("\n", 1)[1]))["core"].line == 1


def test_syntax_errors_have_their_line(write: Write) -> None:
    (problem,) = problems_of(write('name = "x"\n[core\n')).values()
    assert problem.line == 2
    assert problem.message.startswith("no TOML")


def test_files_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    assert "UTF-8" in problems_of(tmp_path / "latin.toml")[""].message
    assert "cannot be read" in problems_of(tmp_path / "absent.toml")[""].message
    assert "cannot be read" in problems_of(tmp_path)[""].message


def test_deep_nesting_is_a_problem_not_a_crash(write: Write) -> None:
    assert "" in problems_of(write("a = " + "[" * 5000 + "]" * 5000))


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_are_finite(refuse: Refuse, number: str) -> None:
    assert [p.field for p in refuse(f"core.lr = {number}")] == ["core.lr"]


# --- paths


def test_relative_paths_count_from_the_folder_of_the_file(load: Load, tmp_path: Path) -> None:
    assert load("output.root = '../a/./b'").spec.output.root == tmp_path.parent / "a" / "b"
    assert load("output.root = '/a//b/'").spec.output.root == Path("/a/b")


def test_the_current_folder_does_not_matter(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write()
    monkeypatch.chdir(tmp_path.parent)
    spec = load_run(Path(tmp_path.name) / "run.toml").spec
    assert spec.output.root == tmp_path / "out"


@pytest.mark.parametrize("path", ["~/runs", "~", "$HOME/runs", "runs/${USER}", "", " "])
def test_nothing_is_expanded_in_paths(refuse: Refuse, path: str) -> None:
    (problem,) = refuse(f'output.root = "{path}"')
    assert problem.field == "output.root"
    assert problem.allowed is not None


# --- aliases


def test_an_alias_sets_its_field(load: Load) -> None:
    spec = load("core.max_train_rollout_logprob_abs_diff = 0.1", "launch.mounts = ['/m']").spec
    assert spec.core.max_mean_logprob_gap == 0.1
    assert spec.launch.weka_mounts == ("/m",)


def test_two_spellings_that_agree_are_one(write: Write) -> None:
    text = "[core]\nmax_mean_logprob_gap = 0.1\nmax_train_rollout_logprob_abs_diff = 0.1\n"
    assert load_run(write(BASE + text)).spec.core.max_mean_logprob_gap == 0.1


def test_two_spellings_that_differ_are_refused_beside_other_problems(write: Write) -> None:
    text = "[launch]\nweka_mounts = ['/a']\nmounts = ['/b']\nreplicas = 'x'\n"
    found = problems_of(write(BASE + text))
    assert found["launch.mounts"].line == 16
    assert "weka_mounts" in found["launch.mounts"].message
    assert found["launch.replicas"].line == 17


# --- --set


def test_set_replaces_after_loading(load: Load) -> None:
    loaded = load("core.lr = 1e-4", "name='other'", "core.lr=2e-4")
    assert (loaded.spec.core.lr, loaded.spec.name) == (2e-4, "other")


def test_set_replaces_a_table_totally(write: Write) -> None:
    path = write(BASE + '[launch]\nenv = { A = "1", B = "2" }\n')
    assert load_run(path, ['launch.env = { C = "3" }']).spec.launch.env == {"C": "3"}


def test_set_replaces_the_other_spelling_too(write: Write) -> None:
    path = write(BASE + "[launch]\nmounts = ['/a']\n")
    assert load_run(path, ["launch.weka_mounts = ['/b']"]).spec.launch.weka_mounts == ("/b",)
    path = write(BASE + "[launch]\nweka_mounts = ['/a']\n")
    assert load_run(path, ["launch.mounts = ['/b']"]).spec.launch.weka_mounts == ("/b",)


def test_problems_of_set_name_it(refuse: Refuse) -> None:
    (problem,) = refuse("core.lrr = 1")
    assert (problem.file, problem.line, problem.nearest) == ("--set", None, "lr")


@pytest.mark.parametrize(
    "text", ["core.lr", "core.lr = ", "core.lr = 1\nx = 2", "= 1", "core.loss = dapo", "name.x = 1"]
)
def test_set_takes_one_toml_value(refuse: Refuse, text: str) -> None:
    (problem,) = refuse(text)
    assert problem.file == "--set"


@given(
    st.lists(st.text("abz_-9", min_size=1), min_size=1, max_size=4),
    st.integers() | st.booleans() | st.text("ab=. #\"'", max_size=5) | st.lists(st.integers()),
)
def test_set_reads_back_what_was_written(key: list[str], value: object) -> None:
    assert parse_set(f"{'.'.join(key)} = {json.dumps(value)}") == (tuple(key), value)


# --- secrets

TOKEN = "hf_abcdefghijABCDEFGHIJ0123456789abcd"


@pytest.mark.parametrize(
    "setting",
    [
        f'launch.secrets = {{ HF_TOKEN = "{TOKEN}" }}',
        f'launch.env = {{ HF_TOKEN = "{TOKEN}" }}',
        f'launch.secrets = "{TOKEN}"',
        f'launch.secrets = {{ "A" = ["{TOKEN}"] }}',
    ],
)
def test_a_token_is_refused_and_never_shown(refuse: Refuse, setting: str) -> None:
    problems = refuse(setting)
    assert problems
    shown = "".join(map(str, problems)) + json.dumps([problem.as_json() for problem in problems])
    assert TOKEN not in shown


@pytest.mark.parametrize(
    "name", ["RAY_ADDRESS", "RANK", "CUDA_VISIBLE_DEVICES", "MASTER_PORT", "1A", "A-B"]
)
@pytest.mark.parametrize("table", ["env", "secrets"])
def test_names_of_the_launcher_are_refused(refuse: Refuse, table: str, name: str) -> None:
    (problem,) = refuse(f'launch.{table} = {{ "{name}" = "x" }}')
    assert name in problem.message


def test_names_of_the_user_are_allowed(load: Load) -> None:
    env = '{ LD_LIBRARY_PATH = "/x", NCCL_SOCKET_IFNAME = "eth", MILEPOST_X = "1" }'
    assert load(f"launch.env = {env}", 'launch.secrets = { HF_TOKEN = "my-hf-secret" }')


# --- times of the scheduler


@pytest.mark.parametrize("value", ["0", '"0"', '"0s"', '""'])
def test_no_protection_has_many_spellings(load: Load, value: str) -> None:
    assert load(f"launch.min_runtime = {value}").spec.launch.min_runtime == 0
    assert load().spec.launch.min_runtime == 0


@pytest.mark.parametrize("image", ["ubuntu", "ubuntu:22.04", "registry/x:latest", "@sha256:12"])
def test_tags_are_no_images(refuse: Refuse, image: str) -> None:
    (problem,) = refuse(f'launch.image = "{image}"')
    assert problem.field == "launch.image"


def test_digests_and_beaker_ids_are_images(load: Load) -> None:
    load(f'launch.image = "registry/x@sha256:{"a" * 64}"')
    load('launch.image = "01HX5ZZKBKACTAV9WEVGEMMVRZ"')


# --- the spec travels


def test_a_resolved_spec_reads_back(load: Load) -> None:
    spec = load('rollout.stop = ["a"]', "launch.memory = '1 GiB'", "data.epochs = 3").spec
    dump = spec.model_dump(mode="json")
    assert RunSpec.model_validate(dump) == spec
    assert RunSpec.model_validate_json(json.dumps(dump)) == spec


# --- nearest names


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("los", "loss"), ("lossss", "loss"), ("lsos", "loss"), ("lossssss", None), ("xy", None)],
)
def test_nearest_name(name: str, nearest: str | None) -> None:
    assert nearest_name(name, ["lr", "loss", "kl"]) == nearest


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_a_distance(a: str, b: str) -> None:
    distance = edit_distance(a, b)
    assert distance == edit_distance(b, a)
    assert (distance == 0) == (a == b)
    assert abs(len(a) - len(b)) <= distance <= max(len(a), len(b))
