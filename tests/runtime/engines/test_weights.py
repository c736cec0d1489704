"""Weights by HF name: whole or not at all, tied ones once, only safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.engines.embedded.weights import Weights, WeightsRefused, read_folder
from runtime.publication.checksum import checksums
from tests.contracts.tiny_models import tiny_llama, tiny_qwen3


def exported(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_checksums_are_those_of_the_trainers_export(make: Any):
    target, source = make(1), make(2)
    weights = Weights(target)
    update = exported(source)
    weights.check(update, whole=True)
    weights.copy(update)
    assert weights.checksums() == checksums(update.items())


def test_tied_weights_may_come_under_either_name():
    model, update = tiny_qwen3(1), exported(tiny_qwen3(2))
    update["lm_head.weight"] = update.pop("model.embed_tokens.weight")
    weights = Weights(model)
    weights.check(update, whole=True)
    weights.copy(update)
    torch.testing.assert_close(model.model.embed_tokens.weight, update["lm_head.weight"])
    assert "lm_head.weight" not in weights.checksums()


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({}, "no tensors"),
        ({"nope": torch.zeros(1)}, "no weight is called"),
        ({"model.norm.weight": torch.zeros(7)}, "does not fit"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, "does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(update: dict[str, torch.Tensor], words: str):
    with pytest.raises(WeightsRefused, match=words):
        Weights(tiny_qwen3(1)).check(update, whole=False)


def test_a_partial_update_is_no_whole_one():
    weights = Weights(tiny_qwen3(1))
    part = {"model.norm.weight": torch.zeros(32)}
    weights.check(part, whole=False)
    with pytest.raises(WeightsRefused, match="23 weights are missing"):
        weights.check(part, whole=True)


def test_other_float_types_are_cast():
    model = tiny_qwen3(1)
    Weights(model).copy({"model.norm.weight": torch.full((32,), 1.5, dtype=torch.bfloat16)})
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.norm.weight[0] == 1.5


def write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    names = list(weights)
    where: dict[str, str] = {}
    for i, part in enumerate((names[:7], names[7:])):
        save_file({n: weights[n] for n in part}, folder / f"part-{i}.safetensors")
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_sharded_folder_is_read_by_its_index(tmp_path: Path):
    update = exported(tiny_qwen3(2))
    write_shards(tmp_path, update)
    save_file({"stale": torch.zeros(1)}, tmp_path / "stale.safetensors")
    assert checksums(sorted(read_folder(str(tmp_path)).items())) == checksums(
        sorted(update.items())
    )


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path):
    with pytest.raises(WeightsRefused, match="no safetensors"):
        read_folder(str(tmp_path))
    write_shards(tmp_path, exported(tiny_qwen3(2)))
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(WeightsRefused, match="part-1"):
        read_folder(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(WeightsRefused, match="cannot read"):
        read_folder(str(tmp_path))
