"""A teacher asked over HTTP trains as the one that the trainer holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from runtime.data.samples import Prompt, PromptId, Sample, Span
from runtime.engines.embedded.server import Server
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.scoring_client import HttpScoringClient
from runtime.errors import ContractViolation
from runtime.policy import PolicyId
from runtime.rollout.teacher import ServedTeacher
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from tests.runtime.trainer.tiny import VOCAB

MakeBatch = Callable[..., TrainBatch]
UPDATES = 6


def student(model: Path, top_k: int, **teacher: object) -> TorchTrainer:
    made = TorchTrainer(
        TrainerSettings(
            loss=LossSettings.named("grpo", tis=False, teacher_coef=1.0, teacher_top_k=top_k),
            optimizer=OptimizerSettings(lr=3e-3),
            updates_per_collection=2,
            **teacher,  # type: ignore[arg-type]
        )
    )
    made.load(str(model))
    return made


def as_sample(s: Sequence) -> tuple[Prompt, Sample]:
    tokens = s.tokens.tolist()
    policy = PolicyId(1, 0)
    response = tuple(tokens[s.prompt_len :])
    prompt = Prompt(
        id=PromptId(0, s.group),
        token_ids=tuple(tokens[: s.prompt_len]),
        text="",
        answer=None,
        verifier="none",
    )
    return prompt, Sample(
        token_ids=response,
        logprobs=tuple(s.logprobs.tolist()),
        spans=(Span(0, len(response), policy),),
        prefill=policy,
        finish="length",
    )


async def scored(teacher: ServedTeacher, batch: TrainBatch) -> TrainBatch:
    sequences: list[Sequence] = []
    for s in batch.sequences:
        prompt, sample = as_sample(s)
        (found,) = await teacher.score(prompt, [sample])
        logprobs, ids = found.arrays(len(sample.token_ids))
        sequences.append(dataclasses.replace(s, teacher_logprobs=logprobs, teacher_ids=ids))
    return dataclasses.replace(batch, sequences=tuple(sequences))


@pytest.mark.parametrize("top_k", [0, 1, 4])
def test_losses_and_weights_are_those_of_the_held_teacher(
    model_folder: Path, teacher_folder: Path, make_batch: MakeBatch, top_k: int
) -> None:
    held = student(model_folder, top_k, teacher=str(teacher_folder))
    served = student(model_folder, top_k, teacher_is_served=True)

    async def main() -> None:
        async with (
            Server(EngineSettings(model_path=str(teacher_folder))) as server,
            HttpScoringClient(server.url, vocab_size=VOCAB) as client,
        ):
            teacher = ServedTeacher([client], top_k=top_k, deadline_s=60, concurrency=8)
            for collection in range(1, UPDATES // 2 + 1):
                batch = make_batch(2 * collection, equal=(1,))
                mine = held.train_step(batch).values
                theirs = served.train_step(await scored(teacher, batch)).values
                assert mine.keys() == theirs.keys()
                for name in ("loss", "policy_loss", "teacher_kl", "total_grad_norm"):
                    assert theirs[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-5), name
                assert abs(mine["teacher_kl"]) > 1e-3

    anyio.run(main)
    for mine, theirs in zip(
        held.export_weights(1 << 30), served.export_weights(1 << 30), strict=True
    ):
        for (name, a), (_, b) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=name)


def test_a_sequence_without_its_scores_is_never_trained_on(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    batch = make_batch(2)
    first = batch.sequences[0]
    of_two = dataclasses.replace(
        first,
        teacher_logprobs=np.repeat(first.logprobs, 2),
        teacher_ids=np.zeros(2 * len(first.logprobs), np.int32),
    )
    for top_k, sequence in ((0, first), (3, first), (3, of_two), (0, of_two)):
        one = student(model_folder, top_k, teacher_is_served=True)
        with pytest.raises(ContractViolation, match=f"of the teacher, for top_k {top_k}"):
            one.train_step(dataclasses.replace(batch, sequences=(sequence, *batch.sequences[1:])))
