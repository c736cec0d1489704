from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.inputs import check_inputs
from tests.configs.conftest import Load

DATA = "data = { train = 'd.jsonl' }"
ROW = '{"prompt": "a", "answer": "b"}'


def problems(load: Load, *sets: str) -> dict[str, str]:
    return dict(check_inputs(load(*sets).spec).problems)


def test_a_recipe_needs_no_files(load: Load) -> None:
    report = check_inputs(load().spec)
    assert (report.problems, report.skipped) == ([], [])


def test_prompts_that_parse(load: Load, tmp_path: Path) -> None:
    chat = json.dumps({"prompt": [{"role": "user", "content": "x"}]})
    (tmp_path / "d.jsonl").write_text(f"{ROW}\n\n{chat}\n")
    report = check_inputs(load(DATA).spec)
    assert report.problems == []
    assert report.checked == ["data.train: 2 prompts parse"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"question": "a"}', "no field 'prompt' (data.prompt_field); it has question"),
        ('{"prompt": 3}', "neither a text nor a chat"),
        ('{"prompt": ""}', "neither a text nor a chat"),
        ('{"prompt": []}', "no chat"),
        ('{"prompt": ["x"]}', "no chat"),
    ],
)
def test_a_row_that_is_no_prompt_is_named_with_its_line(
    load: Load, tmp_path: Path, row: str, text: str
) -> None:
    (tmp_path / "d.jsonl").write_text(f"{ROW}\n{row}\n")
    message = problems(load, DATA)["data.train"]
    assert "d.jsonl:2: " in message
    assert text in message


def test_many_bad_rows_are_counted(load: Load, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("x\n" * 12)
    report = check_inputs(load(DATA).spec)
    assert len(report.problems) == 6
    assert "7 more rows" in report.problems[-1][1]


def test_a_chat_without_a_template(load: Load, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": [{"role": "user", "content": "x"}]}\n')
    message = problems(load, "data = { train = 'd.jsonl', apply_chat_template = false }")
    assert "data.apply_chat_template" in message["data.train"]


def test_files_that_are_absent_or_empty(load: Load, tmp_path: Path) -> None:
    assert "does not exist" in problems(load, DATA)["data.train"]
    (tmp_path / "d.jsonl").write_text("\n")
    assert "no prompts" in problems(load, DATA)["data.train"]


def test_what_lies_under_a_mount_is_skipped_and_listed(load: Load) -> None:
    report = check_inputs(
        load("data = { train = '/no-weka/d.jsonl' }", "launch.mounts = ['/no-weka']").spec
    )
    assert report.problems == []
    assert report.skipped == ["data.train: /no-weka/d.jsonl is under a mount that is not here"]


def test_a_model_folder_needs_config_and_weights(load: Load, tmp_path: Path) -> None:
    model = tmp_path / "m"
    sets = "model = { path = 'm' }"
    assert "does not exist" in problems(load, sets)["model.path"]
    model.mkdir()
    assert "config.json cannot be read" in problems(load, sets)["model.path"]
    (model / "config.json").write_text("{")
    assert "no JSON" in problems(load, sets)["model.path"]
    (model / "config.json").write_text("{}")
    assert "no safetensors" in problems(load, sets)["model.path"]
    (model / "model.safetensors").write_bytes(b"")
    assert problems(load, sets) == {}


def test_parquet_is_recognised_not_read(load: Load, tmp_path: Path) -> None:
    sets = "data = { train = 'd.parquet' }"
    (tmp_path / "d.parquet").write_bytes(b"nope")
    assert "no Parquet" in problems(load, sets)["data.train"]
    (tmp_path / "d.parquet").write_bytes(b"PAR1....PAR1")
    assert check_inputs(load(sets).spec).skipped


def test_the_output_root_can_become_a_folder(load: Load, tmp_path: Path) -> None:
    assert problems(load, "output.root = 'a/b/c'") == {}
    (tmp_path / "a").write_text("")
    assert "is a file" in problems(load, "output.root = 'a/b/c'")["output.root"]


def test_another_vocabulary_shows_both_digests(load: Load, tmp_path: Path) -> None:
    for name, vocabulary in (("s", {"a": 0}), ("t", {"a": 0, "b": 1})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    opd = ('algorithm = "opd"', "model = { path = 's' }")
    message = problems(load, *opd, "teacher.path = 't'")["teacher.path"]
    assert "student" in message
    assert "teacher" in message
    assert problems(load, *opd, "teacher.path = 's'") == {}


@pytest.mark.parametrize(
    ("field", "sets"),
    [
        ("teacher.path", ('algorithm = "opd"', "model = { path = 's' }", "teacher.path = 't'")),
        (
            "core.reference",
            ("model = { path = 's' }", "core = { kl = 'k3', kl_coef = 0.1, reference = 't' }"),
        ),
    ],
)
def test_ranks_that_share_a_row_divide_the_heads_of_every_model(
    load: Load, tmp_path: Path, field: str, sets: tuple[str, ...]
) -> None:
    sizes = {
        "num_attention_heads": 12, "hidden_size": 48, "vocab_size": 9, "num_hidden_layers": 1,
        "intermediate_size": 8,
    }  # fmt: skip
    for name, kv_heads in (("s", 4), ("t", 9)):
        folder = tmp_path / name
        folder.mkdir()
        config = sizes | {"num_key_value_heads": kv_heads}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"")
    sets = (*sets, "launch.gpus_per_replica = 3")
    assert problems(load, *sets, "core.context = 1") == {}
    message = problems(load, *sets, "core.context = 2")[field]
    assert "12 heads and 9 key/value heads; a divisor of 3 does" in message
