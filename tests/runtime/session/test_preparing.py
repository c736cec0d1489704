"""The preparation as its own process: what it says of model and data that cannot be used."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from configs.load import load_run
from configs.plan import make_plan
from runtime.errors import ConfigError
from runtime.recipes.byte_tokenizer import byte_tokenizer
from runtime.rundir import atomic
from runtime.rundir.attempt import AttemptFile
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.session import preparing
from runtime.session.preparing import Prepared, prepare

RUN_FILE = """
name = "prepared"
[model]
path = "{model}"
[data]
train = "{train}"
max_prompt_tokens = 24
[reward]
verifier = "exact_match"
[evaluation.sets.held]
prompts = "{held}"
num_prompts = 2
[core]
max_updates = 1
[output]
root = "{root}"
"""
ROWS = [{"prompt": "abcd", "answer": "dcba"}, {"prompt": "efgh", "answer": "hgfe"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    config = {
        "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8, "vocab_size": 300,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Order:
    """An attempt that is only prepared, by a process that is not tied to a guard."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.train = folder / "train.jsonl"
        self.held = folder / "held.jsonl"
        self.root = RunRoot(folder / "run")
        self.write(self.train, ROWS)
        self.write(self.held, ROWS * 2)

    def write(self, path: Path, rows: list[Any]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def attempt(self, number: int = 1) -> AttemptDir:
        file = self.folder / "run.toml"
        file.write_text(
            RUN_FILE.format(model=self.model, train=self.train, held=self.held, root=self.root.path)
        )
        loaded = load_run(file)
        attempt = self.root.attempt(number)
        attempt.path.mkdir(parents=True)
        atomic.write_bytes(attempt.run, loaded.spec.model_dump_json().encode())
        asked = AttemptFile(run="prepared", training_digest="t", lease_s=30.0)
        atomic.write_bytes(attempt.attempt, asked.encode())
        assert make_plan(loaded).training_digest
        return attempt

    def prepare(self, number: int = 1) -> Prepared:
        return anyio.run(prepare, self.attempt(number))


@pytest.fixture
def order(tmp_path: Path, model: Path) -> Order:
    return Order(tmp_path, model)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The process's main function, called here: importing transformers takes seconds each time."""

    async def run_process(argv: list[str], *, check: bool) -> Any:
        assert argv[1:3] == ["-m", "runtime.session.preparing"]
        assert not check
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", argv[2:])
        status = preparing.main()
        return subprocess.CompletedProcess(argv, status, b"", capfd.readouterr().err.encode())

    monkeypatch.setattr(preparing.deadman, "watch", lambda path: None)
    monkeypatch.setattr(preparing.anyio, "run_process", run_process)


def test_the_process_itself_leaves_a_receipt_or_its_last_words(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the dead-man's switch is left out: there is no guard.
    run = "import sys, runtime.session.preparing as p; p.deadman.watch = lambda *_: None; "
    real = anyio.run_process

    async def run_process(argv: list[str], *, check: bool) -> Any:
        return await real([argv[0], "-c", run + "sys.exit(p.main())", *argv[3:]], check=check)

    monkeypatch.setattr(preparing.anyio, "run_process", run_process)
    assert order.prepare().num_prompts == 2
    order.model = order.folder  # found out before a tokenizer is loaded
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        order.prepare(2)


@pytest.mark.usefixtures("in_this_process")
def test_model_data_and_sets_are_frozen_and_found_again(order: Order) -> None:
    prepared = order.prepare()
    assert (prepared.num_prompts, prepared.sets["held"].num_prompts) == (2, 2)
    assert prepared.model == str(order.model)
    assert Path(prepared.data).is_file()
    assert prepared.longest_prompt_tokens <= 24
    before = Path(prepared.data).stat().st_mtime_ns
    assert order.prepare(2) == prepared
    assert Path(prepared.data).stat().st_mtime_ns == before
    assert Prepared.read(order.root) == prepared


@pytest.mark.usefixtures("in_this_process")
def test_the_source_may_be_gone_once_it_is_frozen(order: Order) -> None:
    prepared = order.prepare()
    order.train.unlink()
    assert order.prepare(2).fingerprint == prepared.fingerprint


@pytest.fixture
def processes(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every preparation process that was run."""
    run: list[str] = []
    real = preparing.anyio.run_process

    async def counted(argv: list[str], *, check: bool) -> Any:
        run.append(argv[3])
        return await real(argv, check=check)

    monkeypatch.setattr(preparing.anyio, "run_process", counted)
    return run


def test_what_stands_is_not_prepared_again(order: Order, processes: list[str]) -> None:
    prepared = order.prepare()
    assert order.prepare(2) == prepared
    assert len(processes) == 1
    order.train.touch()  # may be another content: it is looked at, and found to be the same
    assert order.prepare(3).fingerprint == prepared.fingerprint
    assert len(processes) == 2


def test_a_frozen_copy_that_is_gone_is_named(order: Order, processes: list[str]) -> None:
    prepared = order.prepare()
    Path(prepared.sets["held"].data).unlink()
    with pytest.raises(ConfigError, match=r"evaluation-held\.parquet cannot be read"):
        order.prepare(2)
    assert len(processes) == 2


@pytest.mark.parametrize("damage", ["receipt", "moved"])
def test_what_does_not_stand_is_prepared_again(
    order: Order, processes: list[str], damage: str
) -> None:
    prepared = order.prepare()
    if damage == "receipt":
        preparing.receipt_path(order.root).write_text("{")
    else:
        moved = RunRoot(order.folder / "other")
        shutil.copytree(order.root.path, moved.path)
        order.root = moved
    again = order.prepare(2)
    assert len(processes) == 2
    assert again.fingerprint == prepared.fingerprint
    assert all(
        Path(path).is_relative_to(order.root.path) for path in (again.data, again.sets["held"].data)
    )


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, r"no such data file: .*train\.jsonl"),
        ([], r"train\.jsonl"),
        ([*ROWS, {"prompt": "a" * 60, "answer": ""}], r"train\.jsonl:3: 62 tokens"),
        ([*ROWS, {"question": "abcd"}], "prompt"),
    ],
    ids=["missing", "empty", "too long", "other field"],
)
def test_data_that_cannot_be_used_is_said_in_its_own_words(
    order: Order, rows: list[Any] | None, said: str
) -> None:
    if rows is None:
        order.train.unlink()
    else:
        order.write(order.train, rows)
    with pytest.raises(ConfigError, match=said):
        order.prepare()
    assert Prepared.read(order.root) is None


@pytest.mark.usefixtures("in_this_process")
def test_data_that_changed_between_attempts_is_refused(order: Order) -> None:
    order.prepare()
    order.write(order.train, [*ROWS, {"prompt": "ijkl", "answer": "lkji"}])
    with pytest.raises(ConfigError, match=r"train\.jsonl|changed|fingerprint"):
        order.prepare(2)


@pytest.mark.usefixtures("in_this_process")
def test_a_model_without_config_is_named(order: Order) -> None:
    order.model = order.folder / "nowhere"
    with pytest.raises(ConfigError, match=r"nowhere.*no config\.json"):
        order.prepare()


@pytest.mark.usefixtures("in_this_process")
def test_a_damaged_tokenizer_is_a_configuration_error(order: Order) -> None:
    broken = order.folder / "model"
    broken.mkdir()
    for path in order.model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "tokenizer.json").write_text("{")
    order.model = broken
    with pytest.raises(ConfigError, match="tokenizer"):
        order.prepare()
