"""Learning rates over updates, and of single weights."""

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.trainer.settings import OptimizerSettings
from runtime.trainer.torch.optimizer import learning_rate
from tests.runtime.trainer.trainers import MakeBatch, machinery, trainer

no_deadline = settings(deadline=None, max_examples=60)  # other work shares the cores


@no_deadline
@given(st.integers(0, 30), st.integers(1, 300), st.integers(31, 200))
def test_learning_rate_rises_then_falls(warmup: int, update: int, decay: int) -> None:
    settings = OptimizerSettings(
        lr=1.0, lr_schedule="cosine", lr_decay_updates=decay, min_lr=0.1, warmup_updates=warmup
    )
    rate, following = learning_rate(settings, update), learning_rate(settings, update + 1)
    assert 0 < rate <= 1.0
    if update < warmup:
        assert rate < following
    else:
        assert rate >= following >= 0.1
    assert learning_rate(settings, decay) == pytest.approx(0.1)
    if warmup:
        assert learning_rate(settings, warmup) == 1.0


@no_deadline
@given(st.integers(0, 30), st.sampled_from(["linear", "wsd"]), st.floats(0.05, 1.0))
def test_straight_schedules_stay_then_fall(warmup: int, kind: str, share: float) -> None:
    settings = OptimizerSettings(
        lr=1.0, lr_schedule=kind, lr_decay_updates=100, min_lr=0.1, warmup_updates=warmup,
        lr_decay_share=share,
    )  # fmt: skip
    rates = [learning_rate(settings, update) for update in range(max(warmup, 1), 130)]
    assert all(a >= b >= 0.1 for a, b in pairwise(rates))
    assert rates[-1] == learning_rate(settings, 100) == pytest.approx(0.1)
    falls = 1.0 if kind == "linear" else share
    half_way = 100 - falls * (100 - warmup) / 2
    low, high = math.floor(half_way), math.ceil(half_way)
    assert learning_rate(settings, high) - 1e-9 <= 0.55 <= learning_rate(settings, low) + 1e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_have_rates_and_decays_of_their_own(
    model_folder: Path, make_batch: MakeBatch, dtype: str
) -> None:
    base = OptimizerSettings(lr=1e-2, weight_decay=0.5)
    grouped = dataclasses.replace(
        base, lr_scale=(("*embed*", 0.0), ("*mlp*", 0.1)), undecayed=("*norm.weight",)
    )
    one, plain = (trainer(model_folder, dtype=dtype, optimizer=o) for o in (grouped, base))
    before = [m.detach().clone() for m in machinery(one).weights.masters]
    for each in (one, plain):
        each.train_step(make_batch(1))
    names = machinery(one).weights.names
    masters = [[m.detach() for m in machinery(t).weights.masters] for t in (one, plain)]
    for name, old, mine, theirs in zip(names, before, *masters, strict=True):
        if "embed" in name:
            assert torch.equal(mine, old)
        elif "mlp" in name:
            torch.testing.assert_close(mine - old, 0.1 * (theirs - old), atol=2e-7, rtol=1e-3)
        elif name.endswith("norm.weight"):
            torch.testing.assert_close(mine, theirs + 1e-2 * 0.5 * old, atol=2e-7, rtol=1e-4)
        else:
            assert torch.equal(mine, theirs)
