"""Ranks that share packed rows, over gloo, in processes of their own, against one rank."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LossSettings, TrainerSettings
from runtime.trainer.torch import backend
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.compiled import compile_layers
from runtime.trainer.torch.context import ContextGroup, Part, exchange, shares, to_heads, to_tokens
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.scorer import load_scorer
from tests.runtime.trainer.test_ranks import (
    ADAPTERS,
    SETTINGS,
    Found,
    Job,
    figures,
    gap,
    in_ranks,
    require_equal,
    run,
    run_jobs,
    run_ranks,
)
from tests.runtime.trainer.tiny import make_sequences

pytestmark = pytest.mark.timeout(900)


def one_long(collection: int) -> TrainBatch:
    """Each update has one row of one sequence, of 2 to 91 tokens, an odd number or not."""
    sequences = make_sequences(collection + 40, groups=2, samples=1, longest=90)
    return TrainBatch(update=2 * collection, sequences=sequences, consumed_digest="")


def shortest(collection: int) -> TrainBatch:
    """One of both rows of a collection has a single token: fewer than there are ranks."""
    few = make_sequences(collection, groups=2, samples=1, longest=2)
    one = make_sequences(collection, groups=1, samples=1, longest=1)[0]
    bare = replace(one, tokens=one.tokens[-2:], prompt_len=1)
    return TrainBatch(update=2 * collection, sequences=(bare, few[1]), consumed_digest="")


# What makes a loss of more than single tokens, and what scores more than sampled ones.
SEQUENCES = LossSettings.named(
    "gspo", tis_level="sequence", tis_clip=1.0, entropy_coef=0.01, teacher_coef=0.5, teacher_top_k=3
)


@pytest.fixture(scope="module")
def jobs(teacher_folder: Path) -> dict[str, Job]:
    as_on_gpus = replace(SETTINGS, joint_projections=True, activation_checkpointing=True)
    alone_in_row = replace(SETTINGS, share_prompts=False, max_tokens_per_bin=100)
    return {
        "mixed": Job(settings=as_on_gpus),
        "long": Job(settings=alone_in_row, make=one_long),
        "short": Job(settings=replace(SETTINGS, max_tokens_per_bin=9), make=shortest),
        "sequences": Job(settings=replace(SETTINGS, loss=SEQUENCES, teacher=str(teacher_folder))),
        "adapters": Job(settings=ADAPTERS),
        "once": Job(settings=replace(as_on_gpus, deterministic=True)),
        "again": Job(settings=replace(as_on_gpus, deterministic=True)),
    }


def sharing(job: Job) -> Job:
    return replace(job, settings=replace(job.settings, context=2))


@pytest.fixture(scope="module")
def alone(jobs: dict[str, Job], model_folder: Path) -> dict[str, Found]:
    # Deterministic kernels are switched on for good in a process.
    return {
        name: run(Ranks(), model_folder, settings=job.settings, make=job.make)
        for name, job in jobs.items()
        if not job.settings.deterministic
    }


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job "mixed" leaves its state after four updates."""
    return tmp_path_factory.mktemp("two") / "states"


@pytest.fixture(scope="module")
def two(jobs: dict[str, Job], model_folder: Path, states: Path) -> dict[str, list[Found]]:
    shared = [sharing(job) for job in jobs.values()]
    shared[0] = replace(shared[0], save=states)
    return dict(zip(jobs, run_ranks(2, model_folder, shared, states.parent), strict=True))


@pytest.mark.parametrize("name", ["mixed", "long", "short", "sequences", "adapters"])
def test_two_ranks_that_share_rows_equal_one(
    alone: dict[str, Found], two: dict[str, list[Found]], name: str
) -> None:
    first, second = two[name]
    require_same(alone[name], first)
    assert [figures(v) for v in first.values] == [figures(v) for v in second.values]
    assert all(torch.equal(a, b) for a, b in zip(first.scores, second.scores, strict=True))
    assert gap(first.weights, second.weights) == 0


def require_same(one: Found, other: Found) -> None:
    require_equal(one, other)
    for mine, theirs in zip(one.scores, other.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_same_run_again_is_bit_by_bit_the_same(two: dict[str, list[Found]]) -> None:
    first, again = two["once"][0], two["again"][0]
    assert [figures(v) for v in first.values] == [figures(v) for v in again.values]
    assert gap(first.weights, again.weights) == 0


def test_one_rank_reads_the_state_of_two_that_share_rows(
    jobs: dict[str, Job], two: dict[str, list[Found]], model_folder: Path, states: Path
) -> None:
    resumed = run(Ranks(), model_folder, settings=jobs["mixed"].settings, start=states)
    assert resumed.restored == {"update": 4, "consumed_digest": "digest-2"}
    assert gap(two["mixed"][0].weights, resumed.weights) < 1e-5


def four_ranks(model: Path, job: Job, ranks: Ranks) -> list[dict[str, Any]]:
    check_exchange(ranks)
    return run_jobs(model, [job], ranks)


def test_two_pairs_of_ranks_equal_one(
    jobs: dict[str, Job], alone: dict[str, Found], model_folder: Path, tmp_path: Path
) -> None:
    work = partial(four_ranks, model_folder, sharing(jobs["mixed"]))
    for (found,) in in_ranks(4, work, tmp_path):
        require_same(alone["mixed"], Found(**found))


def compiled_short(model: Path, settings: TrainerSettings, ranks: Ranks) -> dict[str, Any]:
    """A step and scores of rows of which one has a single token; by a backend without code."""
    backend.compile_layers = partial(compile_layers, backend="aot_eager")
    trainer = TorchTrainer(settings, ranks)
    trainer.load(str(model))
    values = trainer.train_step(shortest(1)).values
    scores = [
        torch.from_numpy(s) for s in trainer.score(shortest(9).sequences[:1], temperature=1.0)
    ]
    return {"values": values, "scores": scores}


def test_compiled_ranks_share_a_row_of_one_token(model_folder: Path, tmp_path: Path) -> None:
    # No reference: it would be compiled too.
    settings = replace(SETTINGS, max_tokens_per_bin=9, loss=LossSettings.named("grpo"))
    alone = TorchTrainer(settings)
    alone.load(str(model_folder))
    values = figures(alone.train_step(shortest(1)).values)
    scores = alone.score(shortest(9).sequences[:1], temperature=1.0)
    shared = replace(settings, context=2, compile=True, activation_checkpointing=True)
    for found in in_ranks(2, partial(compiled_short, model_folder, shared), tmp_path):
        assert figures(found["values"]) == pytest.approx(values, rel=2e-4, abs=1e-5)
        for mine, theirs in zip(scores, found["scores"], strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-4, rtol=1e-4)


def check_exchange(ranks: Ranks) -> None:
    """Rows that every rank knows whole, so that each can say what it must get; uneven slices."""
    ranks.share_rows(ranks.size)
    context = ranks.context
    assert context is not None
    for seed in range(30):
        numbers = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if seed % 3 == 0 else torch.float32
        sizes = torch.randint(1, 4, (context.size,), generator=numbers).tolist()
        spare = seed % context.size
        if spare:  # a row of less tokens than ranks
            sizes = [1] * context.size
        row_tokens = sum(sizes) - spare
        part = Part(
            rank=context.rank,
            group=context.name,
            sizes=tuple(sizes),
            spare=spare,
            place_N=torch.zeros(0, dtype=torch.int64),
        )
        tokens = slice(sum(sizes[: part.rank]), sum(sizes[: part.rank + 1]))
        kinds = [
            torch.randn(2, 1, n * context.size, sum(sizes), 3, generator=numbers).to(dtype)
            for n in (2, 1, 1)
        ]
        mine = [row[:, :, tokens].clone().requires_grad_() for row, _ in kinds]
        by_heads = to_heads(part, *mine)
        for (row, weight), got, own in zip(kinds, by_heads, mine, strict=True):
            heads = slice(part.rank * got.shape[1], (part.rank + 1) * got.shape[1])
            assert torch.equal(got, row[:, heads, :row_tokens])
            asked = weight[:, heads, :row_tokens]
            (gradient,) = torch.autograd.grad(got, own, asked, retain_graph=True)
            is_spare = part.rank >= context.size - spare
            assert torch.equal(gradient, weight[:, :, tokens] * (not is_spare))
        back = to_tokens(part, by_heads[0].transpose(1, 2))
        # Nothing comes back for a spare token.
        assert torch.equal(back, mine[0].transpose(1, 2) * (not is_spare))
        counts = torch.randint(0, 3, (context.size, context.size), generator=numbers)
        send, receive = counts[part.rank].tolist(), counts[:, part.rank].tolist()
        rows = torch.randn(sum(send), 2, generator=numbers)
        there = exchange(rows, send, receive, part.group)
        assert torch.equal(exchange(there, receive, send, part.group), rows)


@given(st.integers(1, 40), st.integers(2, 8), st.data())
def test_every_token_and_every_prediction_has_one_rank(
    tokens: int, size: int, data: st.DataObject
) -> None:
    places = st.lists(st.integers(0, tokens - 1), max_size=20)
    row = {
        "token_T": np.arange(tokens) + 100,
        "position_T": np.arange(tokens),
        "source_R": np.array(data.draw(places), dtype=np.int64),
        "target_R": np.arange(3),
    }
    divided = [ContextGroup(rank=r, size=size, name="").divide(row) for r in range(size)]
    sizes = shares(max(tokens, size), size)
    assert sum(sizes) == max(tokens, size)
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1
    assert all(found == sizes for _, found in divided)
    for name in ("token_T", "position_T"):
        parts = [mine[name] for mine, _ in divided]
        assert all(len(part) == own for part, own in zip(parts, sizes, strict=True))
        whole = np.concatenate(parts)
        assert np.array_equal(whole[:tokens], row[name])
        assert (whole[tokens:] == row[name][0]).all()
    start, predicted = 0, np.full(len(row["source_R"]), -1)
    for (mine, _), own in zip(divided, sizes, strict=True):
        assert ((mine["source_R"] >= 0) & (mine["source_R"] < own)).all()
        assert (predicted[mine["place_N"]] == -1).all()
        predicted[mine["place_N"]] = mine["source_R"] + start
        assert mine["target_R"] is row["target_R"]
        start += own
    assert np.array_equal(predicted, row["source_R"])


def test_what_cannot_be_divided_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 trainer rank.* to one of \[1\]"):
        TorchTrainer(TrainerSettings(context=2)).load(str(model_folder))
    with pytest.raises(ConfigError, match=r"4 heads and 2 key/value heads.* to one of \[1, 2\]"):
        load_scorer(
            str(model_folder), temperature=1.0, chunk=8, activation_checkpointing=False, context=4
        )
