"""Log-probs of engines beside the trainer's: measured, told apart, and refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.errors import ContractViolation
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.torch.backend import TorchTrainer
from tests.runtime.trainer.trainers import MakeBatch, parameters, trainer


def agreeing(one: TorchTrainer, batch: TrainBatch, *, gap: float, update: int = 0) -> TrainBatch:
    """The batch as an engine with the trainer's weights would give it, off by ``gap``."""
    scores = one.score(batch.sequences, temperature=1.0)
    return dataclasses.replace(
        batch,
        sequences=tuple(
            dataclasses.replace(
                s,
                logprobs=(p - gap).astype(np.float32),
                prefill_update=update,
                span_updates=np.array([update], np.int32),
            )
            for s, p in zip(batch.sequences, scores, strict=True)
        ),
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_agreement_is_measured_at_equal_weights(
    model_folder: Path, make_batch: MakeBatch, steps: int
) -> None:
    one = trainer(model_folder, updates_per_collection=steps)
    batch = agreeing(one, make_batch(steps), gap=5e-5)
    values = one.train_step(batch).values
    assert values["agreement/gap_mean"] == pytest.approx(5e-5, rel=0.1)
    assert values["agreement/responses"] == 12 if steps == 1 else 6
    assert values["tis/clip_share"] == 0
    assert values["tis/ess"] == pytest.approx(1.0)


def test_disagreement_stops_before_any_weight_moves(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = trainer(model_folder)
    before = parameters(one)
    with pytest.raises(ContractViolation, match="policy_agreement") as caught:
        one.train_step(agreeing(one, make_batch(1), gap=2e-3))
    assert caught.value.detail["agreement/gap_mean"] == pytest.approx(2e-3, rel=0.01)
    after = parameters(one)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert one.update == 0


def test_responses_of_an_older_policy_are_not_measured(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = trainer(model_folder)
    values = one.train_step(agreeing(one, make_batch(1), gap=2.0, update=-3)).values
    assert not [name for name in values if name.startswith("agreement/")]
    assert values["tis/clip_share"] == 1.0  # exp(2) is beyond the bound of 2


def test_refreshed_responses_are_told_apart(model_folder: Path, make_batch: MakeBatch) -> None:
    one = trainer(model_folder)
    scored = agreeing(one, make_batch(1, longest=9), gap=0.0, update=-1).sequences
    at = max(range(len(scored)), key=lambda i: len(scored[i].logprobs))
    s = scored[at]
    n = len(s.logprobs)
    gaps = np.where(np.arange(n) < n - 2, 1.0, 0.25).astype(np.float32)
    mixed = dataclasses.replace(
        s,
        mask=np.ones(n, np.float32),
        logprobs=s.logprobs - gaps,
        span_ends=np.array([n - 2, n], np.int32),
        span_updates=np.array([-1, 0], np.int32),
    )
    batch = make_batch(1)
    values = one.train_step(
        dataclasses.replace(batch, sequences=(*scored[:at], mixed, *scored[at + 1 :]))
    ).values
    assert values["refresh/mixed_responses"] == 1
    assert values["refresh/prefix_gap_mean"] == pytest.approx(1.0, rel=1e-3)
    assert values["refresh/prefix_clip_share"] == 1.0
    assert values["refresh/prefix_tokens"] == n - 2
    assert values["refresh/latest_gap_mean"] == pytest.approx(0.25, rel=1e-3)
    assert values["refresh/latest_clip_share"] == 0.0
    assert values["refresh/latest_tokens"] == 2
    assert "agreement/gap_mean" not in values
