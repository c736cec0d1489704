"""Folders of weights that a server is never told to load, and that it would not load if it were."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from runtime.engines.sglang.inside.folders import hook_folders
from runtime.engines.weight_folder import check_folder
from runtime.errors import PartialWrite
from runtime.publication.safetensors_file import INDEX
from runtime.publication.snapshot import write_snapshot
from tests.runtime.publication.tiny_engines import TinyTrainer

NAMES = {f"layer.{i}.weight" for i in range(3)}


@pytest.fixture(params=["one file", "three files and their index"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    size = 2**20 if request.param == "one file" else 32
    write_snapshot(TinyTrainer(), str(tmp_path), shard_bytes=size)
    assert (tmp_path / INDEX).exists() is (size == 32)
    return tmp_path


def test_a_whole_folder_passes_with_or_without_its_names(folder: Path):
    check_folder(folder)
    check_folder(str(folder), NAMES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_folder_is_refused_whichever_file_is_cut_wherever(folder: Path, data: st.DataObject):
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    # What an index is padded with at its end says nothing.
    size = len(whole.rstrip()) if path.name == INDEX else len(whole)
    path.write_bytes(whole[: data.draw(st.integers(min_value=0, max_value=size - 1))])
    try:
        with pytest.raises(PartialWrite):
            check_folder(folder, NAMES)
    finally:
        path.write_bytes(whole)
    check_folder(folder, NAMES)


@pytest.mark.parametrize("names", [set(), NAMES - {"layer.0.weight"}, NAMES | {"lm_head.weight"}])
def test_other_weights_than_were_written_are_refused(folder: Path, names: set[str]):
    with pytest.raises(PartialWrite, match="3 weights where"):
        check_folder(folder, names)


def gone(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def in_two_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"layer.0.weight": torch.zeros(1)}, folder / "more.safetensors")


def another_in_the_file(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, next(folder.glob("*.safetensors")))


def index_of(held: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps(held))

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        gone,
        in_two_files,
        another_in_the_file,
        index_of([]),
        index_of({"weight_map": []}),
        index_of({"weight_map": {}}),
        index_of({"weight_map": {"a": 1}}),
        index_of({"weight_map": {"a": "../a.safetensors"}}),
        index_of({"weight_map": {"a": "absent.safetensors"}}),
    ],
)
def test_an_index_and_its_files_must_agree(tmp_path: Path, spoil: Callable[[Path], None]):
    write_snapshot(TinyTrainer(), str(tmp_path), shard_bytes=32)
    spoil(tmp_path)
    with pytest.raises(PartialWrite):
        check_folder(tmp_path)


def test_a_folder_that_is_none_or_holds_nothing_is_refused(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file", "owner/model", "a\0b"):
        with pytest.raises(PartialWrite):
            check_folder(path)


# Inside the server


class TokenizerManager:
    """What the hook touches, as upstream has it."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[Any, ...]:
        self.loaded.append(obj.model_path)
        return True, "Succeeded to update model weights.", 0


def test_the_server_answers_for_a_torn_folder_and_never_loads_it(tmp_path: Path):
    module = SimpleNamespace(TokenizerManager=type("Hooked", (TokenizerManager,), {}))
    hook_folders(module)
    manager = module.TokenizerManager()
    write_snapshot(TinyTrainer(), str(tmp_path))

    def ask(load_format: str | None = None) -> tuple[Any, ...]:
        obj = SimpleNamespace(model_path=str(tmp_path), load_format=load_format)
        return asyncio.run(manager.update_weights_from_disk(obj, None))

    assert ask()[0] is True
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for load_format in (None, "auto", "safetensors"):
        success, message, paused = ask(load_format)
        assert (success, paused) == (False, 0)
        assert message.startswith("Failed to get weights iterator: ")
    assert manager.loaded == [str(tmp_path)]
    # Another format reads other files.
    assert ask("pt")[0] is True
