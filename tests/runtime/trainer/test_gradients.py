"""Scores and gradients, against plain torch and transformers, however rows are packed."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LossSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.packer import Packer
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.update import Update
from tests.runtime.trainer.trainers import MakeBatch, machinery, trainer


def hf_logprobs(folder: Path, sequence: Sequence, temperature: float) -> torch.Tensor:
    """transformers' own forward pass of one sequence by itself, without packing or sharing."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, sequence.prompt_len - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[sequence.prompt_len :, None]).squeeze(1)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_transformers_one_by_one(
    model_folder: Path, make_batch: MakeBatch, share: bool, temperature: float
) -> None:
    one = trainer(
        model_folder, share_prompts=share, temperature=temperature, max_tokens_per_bin=60,
        head_chunk_tokens=5,
    )  # fmt: skip
    sequences = make_batch(1).sequences
    scores = one.score(sequences, temperature=temperature)
    for sequence, got in zip(sequences, scores, strict=True):
        want = hf_logprobs(model_folder, sequence, temperature)
        torch.testing.assert_close(
            torch.from_numpy(got).double(), want, atol=2e-5, rtol=1e-5, check_dtype=False
        )


def test_score_at_another_temperature_is_refused(model_folder: Path, make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match=r"scores at 1\.0"):
        trainer(model_folder).score(make_batch(1).sequences, temperature=0.5)


def gradient_of(
    one: TorchTrainer, batch: TrainBatch, *, capacity: int, share: bool, ranks: int
) -> list[torch.Tensor]:
    """The gradient of the batch as ``ranks`` data ranks would add it up, run one after another."""
    m = machinery(one)
    m.weights.drop_gradients()
    for rank in range(ranks):
        packer = Packer(
            Ranks(rank, ranks), capacity=capacity, share_prompts=share, cost=lambda u: u.tokens
        )
        update = Update(dataclasses.replace(m, packer=packer), batch, skipped_before=0)
        update.accumulate(list(range(len(batch.sequences))))
    found = [g.clone() for g in m.weights.collect_gradients()]
    m.weights.drop_gradients()
    return found


@pytest.fixture(scope="module")
def trainers(model_folder: Path) -> dict[str, TorchTrainer]:
    return {
        name: trainer(
            model_folder,
            loss=LossSettings.named(name, kl="k3", kl_coef=0.05, entropy_coef=0.01),  # type: ignore[arg-type]
        )
        for name in ("grpo", "dr_grpo", "dapo", "gspo", "reinforce")
    }


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 1000),
    name=st.sampled_from(["grpo", "dr_grpo", "dapo", "gspo", "reinforce"]),
    capacity=st.integers(20, 200),
    share=st.booleans(),
    ranks=st.integers(1, 4),
)
def test_any_packing_and_data_parallel_split_gives_the_same_gradient(
    trainers: dict[str, TorchTrainer],
    make_batch: MakeBatch,
    seed: int,
    name: str,
    capacity: int,
    share: bool,
    ranks: int,
) -> None:
    batch = make_batch(1, seed=seed)
    whole = gradient_of(trainers[name], batch, capacity=100_000, share=False, ranks=1)
    split = gradient_of(trainers[name], batch, capacity=capacity, share=share, ranks=ranks)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in whole))
    gap = math.sqrt(
        sum((a - b).double().square().sum().item() for a, b in zip(whole, split, strict=True))
    )
    assert norm > 0
    assert gap <= 1e-5 * norm


def test_gradient_equals_plain_autograd_of_the_plain_model(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    # DAPO at the old policy: -(sum of ratio x advantage x tis) / active tokens.
    one = trainer(model_folder, loss=LossSettings.named("dapo"))
    batch = make_batch(1)
    got = gradient_of(one, batch, capacity=100_000, share=True, ranks=1)
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    active = sum(float((s.mask > 0).sum()) for s in batch.sequences)
    for s in batch.sequences:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        logits = model(tokens[None]).logits[0, s.prompt_len - 1 : -1]
        now = logits.log_softmax(-1).gather(1, tokens[s.prompt_len :, None]).squeeze(1)
        weight = (now.detach() - torch.from_numpy(s.logprobs).double()).exp().clamp(0, 2)
        mask = torch.from_numpy(s.mask).double()
        (-(now - now.detach()).exp() * s.advantage * weight * mask).sum().div(active).backward()
    want = dict(model.named_parameters())
    for name, gradient in zip(machinery(one).weights.names, got, strict=True):
        expected = want[name].grad
        assert expected is not None
        torch.testing.assert_close(gradient.cpu().double(), expected, atol=2e-6, rtol=2e-4)


def test_recomputed_old_policy_equals_a_scoring_pass(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    """One step detaches the current log-probs; scoring ahead gives the same, a pass later."""
    batch = make_batch(1)
    fast, slow = trainer(model_folder), trainer(model_folder)
    update = Update(machinery(slow), batch, skipped_before=0)
    update._score_ahead(num_steps=2)
    assert update._is_scored_ahead
    slow_sums = update.accumulate(list(range(len(batch.sequences))))
    fast_values = fast.train_step(batch).values
    assert slow_sums["loss"] == pytest.approx(fast_values["loss"], rel=1e-5)


def test_policy_norm_is_measured_apart_when_other_terms_are_active(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    loss = LossSettings.named("grpo", kl="k3", kl_coef=0.5, entropy_coef=2.0)
    one = trainer(model_folder, loss=loss, policy_grad_norm_every=2)
    plain = trainer(model_folder).train_step(make_batch(1)).values
    first, second, third = (one.train_step(make_batch(u)).values for u in (1, 2, 3))
    assert first["policy_grad_norm"] == pytest.approx(plain["total_grad_norm"], rel=1e-5)
    assert first["total_grad_norm"] != pytest.approx(first["policy_grad_norm"], rel=1e-3)
    assert "policy_grad_norm" not in second
    assert "policy_grad_norm" in third
    assert first["elapsed_s/diagnostics"] > 0
    assert "elapsed_s/diagnostics" not in second
    assert first["kl_loss"] == 0  # the policy still is its reference
    assert second["kl_loss"] > 0
    assert "entropy" in first


def test_checkpointed_activations_change_nothing(model_folder: Path, make_batch: MakeBatch) -> None:
    plain = trainer(model_folder).train_step(make_batch(1)).values
    recomputed = trainer(model_folder, activation_checkpointing=True)
    values = recomputed.train_step(make_batch(1)).values
    assert values["total_grad_norm"] == pytest.approx(plain["total_grad_norm"], rel=1e-6)
