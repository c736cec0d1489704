"""A trainer's updates: what moves, what is skipped or refused, and what is exported."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from runtime.errors import ConfigError, ContractViolation, UnavailableFeature
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LossSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from tests.runtime.trainer.trainers import MakeBatch, machinery, parameters, trainer


def test_same_seed_gives_identical_losses_and_weights(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    def run() -> tuple[list[float], dict[str, torch.Tensor]]:
        one = trainer(model_folder, deterministic=True)
        return [one.train_step(make_batch(u)).values["loss"] for u in (1, 2, 3)], parameters(one)

    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def test_a_collection_makes_as_many_updates_as_the_run_file_says(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = trainer(model_folder, updates_per_collection=3)
    values = one.train_step(make_batch(3, groups=5)).values
    assert values["optimizer_steps"] == 3
    assert machinery(one).optimizer.num_steps == 3
    assert one.update == 3
    # Off-policy from the second step on, so ratios differ from 1 and the loss shows it.
    assert values["policy_loss"] != pytest.approx(
        trainer(model_folder).train_step(make_batch(1, groups=5)).values["policy_loss"], rel=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_groups_alone_have_no_policy_gradient(
    model_folder: Path, make_batch: MakeBatch, dtype: str
) -> None:
    one = trainer(model_folder, dtype=dtype)
    values = one.train_step(make_batch(1, groups=3, equal=(0, 1, 2))).values
    assert values["policy_gradient_expected"] == 0
    assert values["policy_grad_norm"] == 0
    assert values["total_grad_norm"] == 0
    assert (values["mixed_groups"], values["equal_groups"]) == (0, 3)
    assert values["parameter_change_norm"] == 0


def test_equal_groups_with_an_advantage_are_refused(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    batch = make_batch(1)
    wrong = dataclasses.replace(batch.sequences[0], is_equal=True, advantage=0.5)
    with pytest.raises(ContractViolation, match="equal rewards has advantage"):
        trainer(model_folder).train_step(
            dataclasses.replace(batch, sequences=(wrong, *batch.sequences[1:]))
        )


def test_kl_in_the_reward_moves_equal_groups(model_folder: Path, make_batch: MakeBatch) -> None:
    loss = LossSettings.named("grpo", kl="k1", kl_reward_coef=0.5)
    one = trainer(model_folder, loss=loss)
    one.train_step(make_batch(1))
    values = one.train_step(make_batch(2, equal=(0, 1, 2, 3))).values
    assert values["policy_gradient_expected"] == 1
    assert values["policy_grad_norm"] > 0


def poisoned(batch: TrainBatch) -> TrainBatch:
    broken = dataclasses.replace(batch.sequences[0], advantage=math.inf)
    return dataclasses.replace(batch, sequences=(broken, *batch.sequences[1:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_skips_the_step(
    model_folder: Path, make_batch: MakeBatch, dtype: str
) -> None:
    one = trainer(model_folder, max_skipped_steps=1, dtype=dtype)
    before = parameters(one)
    values = one.train_step(poisoned(make_batch(1))).values
    assert (values["skipped_steps"], values["skipped_steps_total"]) == (1, 1)
    assert values["optimizer_steps"] == 0
    assert values["parameter_change_norm"] == 0
    assert "total_grad_norm" not in values
    assert all(math.isfinite(v) for v in values.values())
    assert machinery(one).optimizer.num_steps == 0
    assert all(torch.equal(before[n], t) for n, t in parameters(one).items())
    assert one.train_step(make_batch(2)).values["skipped_steps"] == 0
    with pytest.raises(ContractViolation, match=r"2 step\(s\) skipped"):
        one.train_step(poisoned(make_batch(3)))


def test_updates_are_made_in_order(model_folder: Path, make_batch: MakeBatch) -> None:
    one = trainer(model_folder)
    with pytest.raises(ContractViolation, match="stands at update 0; a batch for 2 came"):
        one.train_step(make_batch(2))


def test_export_gives_every_weight_once_in_buckets(model_folder: Path) -> None:
    one = trainer(model_folder)
    specs = one.weight_specs()
    buckets = list(one.export_weights(3000))
    flat = [(name, tensor) for bucket in buckets for name, tensor in bucket]
    assert [name for name, _ in flat] == [spec.name for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs)
    assert "lm_head.weight" not in {spec.name for spec in specs}, "tied weights once"
    stored = Qwen3ForCausalLM.from_pretrained(model_folder).state_dict()
    for (name, tensor), spec in zip(flat, specs, strict=True):
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{spec.dtype}", spec.shape)
        assert torch.equal(tensor, stored[name])
    for bucket in buckets:
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 3000
    assert len(buckets) > 1


def test_bf16_keeps_fp32_masters(model_folder: Path, make_batch: MakeBatch) -> None:
    exact = trainer(model_folder)
    rounded = trainer(model_folder, dtype="bfloat16", max_mean_logprob_gap=0.05)
    for update in (1, 2, 3):
        a = exact.train_step(make_batch(update)).values
        b = rounded.train_step(make_batch(update)).values
        assert b["total_grad_norm"] == pytest.approx(a["total_grad_norm"], rel=0.1)
    weights = machinery(rounded).weights
    assert all(p.dtype == torch.bfloat16 for p in weights.params)
    for param, master in zip(weights.params, weights.masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(torch.bfloat16))
    # lr 1e-3 on weights near 1 is below half a bf16 step: only masters can have kept it.
    norms = [m for n, m in zip(weights.names, weights.masters, strict=True) if "norm" in n]
    assert any((m.detach() - 1).abs().max() > 1e-3 for m in norms)
    assert all(t.dtype == torch.bfloat16 for t in parameters(rounded).values())


def test_a_model_this_forward_would_get_wrong_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    model.config.use_sliding_window = True
    model.config.sliding_window = 4
    model.config.layer_types = ["full_attention", "sliding_attention"]
    model.save_pretrained(tmp_path / "sliding")
    with pytest.raises(UnavailableFeature, match="sliding_attention"):
        trainer(tmp_path / "sliding")


def test_reference_is_frozen_and_rounded_like_the_policy(model_folder: Path) -> None:
    one = trainer(
        model_folder, dtype="bfloat16", loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1)
    )
    reference = machinery(one).reference
    assert reference is not None
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in reference.parameters())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model folder .*nowhere"):
        TorchTrainer(TrainerSettings()).load(str(tmp_path / "nowhere"))
