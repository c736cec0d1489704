"""Adapters: what trains, what is stored, and what leaves."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from runtime.errors import ConfigError, DiskFull, PartialWrite
from runtime.publication.peft import CONFIG
from runtime.publication.snapshot import write_snapshot
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LoraSettings, LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.lora import write_config
from tests.runtime.trainer.tiny import tiny_config

MakeBatch = Callable[..., TrainBatch]
LORA = LoraSettings(rank=4, alpha=8.0)
SETTINGS = TrainerSettings(
    lora=LORA, optimizer=OptimizerSettings(lr=1e-2), max_mean_logprob_gap=1e-4
)


def trainer(folder: Path, **changes: object) -> TorchTrainer:
    made = TorchTrainer(dataclasses.replace(SETTINGS, **changes))  # type: ignore[arg-type]
    made.load(str(folder))
    return made


def exported(one: TorchTrainer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in one.export_weights(1 << 30) for n, t in bucket}


def base_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(Qwen3ForCausalLM.from_pretrained(folder).named_parameters())


def test_it_begins_at_the_base_and_moves_targets_alone(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one, base = trainer(model_folder), base_of(model_folder)
    assert exported(one).keys() == base.keys()
    assert [s.name for s in one.weight_specs()] == list(exported(one))
    assert all(torch.equal(t, base[n]) for n, t in exported(one).items())
    values = [one.train_step(make_batch(u)).values for u in (1, 2)]
    assert values[0]["total_grad_norm"] > 0
    moved = {n for n, t in exported(one).items() if not torch.equal(t, base[n])}
    assert moved == {n for n in base if n.split(".")[-2] in LORA.targets}


def test_what_is_merged_computes_what_was_trained(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = trainer(model_folder)
    for update in (1, 2, 3):
        one.train_step(make_batch(update))
    model = Qwen3ForCausalLM(tiny_config())
    model.load_state_dict(
        exported(one) | {"lm_head.weight": exported(one)["model.embed_tokens.weight"]}
    )
    sequences = make_batch(9).sequences
    for s, got in zip(sequences, one.score(sequences, temperature=1.0), strict=True):
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, s.prompt_len - 1 : -1]
        want = logits.log_softmax(-1).gather(1, tokens[s.prompt_len :, None]).squeeze(1)
        torch.testing.assert_close(torch.from_numpy(got), want, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_alone_is_what_peft_reads(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path, dtype: str
) -> None:
    one = trainer(model_folder, dtype=dtype, max_mean_logprob_gap=1.0)
    one.train_step(make_batch(1))
    write_snapshot(one.adapter, str(tmp_path))
    one.adapter.finish(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["base_model_name_or_path"] == str(model_folder)
    found = load_file(tmp_path / "adapter_model.safetensors")
    want, base = exported(one), base_of(model_folder)
    count = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in found:
            continue
        count += 1
        a, b = (found[f"{stem}.lora_{x}.weight"].float() for x in "AB")
        merged = weight.detach().to(want[name].dtype).float() + config["lora_alpha"] / config[
            "r"
        ] * (b @ a)
        torch.testing.assert_close(merged.to(want[name].dtype), want[name])
    assert (count, len(found)) == (14, 28)


def test_a_commit_holds_adapters_and_names_their_base(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    one = trainer(model_folder)
    one.train_step(make_batch(1))
    one.write_staged(one.stage().token, str(tmp_path))
    stored = load_file(tmp_path / "trainer-00000-of-00001.safetensors")
    assert {n.rpartition(".")[2] for n in stored if n.startswith("master/")} == {"lora_A", "lora_B"}
    want = one.train_step(make_batch(2)).values["loss"]
    again = trainer(model_folder, seed=5)
    again.restore(str(tmp_path))
    assert again.train_step(make_batch(2)).values["loss"] == want
    assert all(torch.equal(t, exported(one)[n]) for n, t in exported(again).items())

    other = tmp_path / "other"
    torch.manual_seed(3)
    Qwen3ForCausalLM(tiny_config()).save_pretrained(other)
    with pytest.raises(PartialWrite, match="adapters of the base"):
        trainer(other).restore(str(tmp_path))
    with pytest.raises(PartialWrite, match="None: all weights train"):
        trainer(model_folder, lora=None).restore(str(tmp_path))


def test_the_base_is_the_reference(model_folder: Path, make_batch: MakeBatch) -> None:
    loss = LossSettings.named("grpo", kl="k3", kl_coef=0.1)
    shared = trainer(model_folder, loss=loss)
    apart = trainer(model_folder, loss=loss, reference=str(model_folder))
    for update in (1, 2, 3):
        mine, theirs = (t.train_step(make_batch(update)).values for t in (shared, apart))
        assert mine["kl_loss"] == pytest.approx(theirs["kl_loss"], rel=1e-4, abs=1e-7)
        assert (mine["kl_loss"] > 0) == (update > 1)


def test_weights_beside_the_adapters_train_whole_and_go_along(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    also = dataclasses.replace(LORA, also=("*embed_tokens*",))
    loss = LossSettings.named("grpo", kl="k3", kl_coef=0.1)
    one, base = trainer(model_folder, lora=also, loss=loss), base_of(model_folder)
    for update in (1, 2):
        values = one.train_step(make_batch(update)).values
    assert values["kl_loss"] > 0, "the reference is the base, embedding included"
    name = "model.embed_tokens.weight"
    assert not torch.equal(exported(one)[name], base[name])
    write_snapshot(one.adapter, str(tmp_path))
    one.adapter.finish(tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(found[f"base_model.model.{name}"], exported(one)[name])
    assert torch.equal(found["base_model.model.lm_head.weight"], exported(one)[name]), "tied"
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]


def test_dropout_is_of_the_training_pass_alone(model_folder: Path, make_batch: MakeBatch) -> None:
    one = trainer(model_folder, lora=dataclasses.replace(LORA, dropout=0.5))
    one.train_step(make_batch(1))
    sequences = make_batch(2).sequences
    first, second = (one.score(sequences, temperature=1.0) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    agreed = tuple(
        dataclasses.replace(s, logprobs=p, prefill_update=1, span_updates=np.array([1], np.int32))
        for s, p in zip(sequences, first, strict=True)
    )
    values = one.train_step(TrainBatch(update=2, sequences=agreed, consumed_digest="")).values
    assert values["agreement/gap_mean"] < 1e-5


def test_a_disk_that_is_full_at_the_adapters_config_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG).symlink_to("/dev/full")
    settings = LoraSettings(rank=2, alpha=4.0, targets=("q_proj",))
    with pytest.raises(DiskFull):
        write_config(tmp_path, settings, "/m")


def test_a_target_that_is_not_there_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layer named qkv_proj"):
        trainer(model_folder, lora=dataclasses.replace(LORA, targets=("q_proj", "qkv_proj")))
    with pytest.raises(ConfigError, match=r"lora\.rank is 0"):
        _ = trainer(model_folder, lora=None).adapter
