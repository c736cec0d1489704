"""A student under a teacher that the trainer holds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from runtime.errors import ConfigError
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from tests.runtime.trainer.tiny import tiny_config

MakeBatch = Callable[..., TrainBatch]


def student(model: Path, teacher: Path, **loss: object) -> TorchTrainer:
    made = TorchTrainer(
        TrainerSettings(
            loss=LossSettings.named("grpo", tis=False, **({"teacher_coef": 1.0} | loss)),
            optimizer=OptimizerSettings(lr=3e-3),
            teacher=str(teacher),
        )
    )
    made.load(str(model))
    return made


def plain(
    folder: Path, batch: TrainBatch, *, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """transformers' own log-probs over the vocabulary at each response token."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found: list[torch.Tensor] = []
    for s in batch.sequences:
        with torch.no_grad():
            logits = model(torch.from_numpy(s.tokens.astype(np.int64))[None]).logits[0]
        found.append(logits[s.prompt_len - 1 : -1].log_softmax(-1))
    return found


def without_rewards(batch: TrainBatch) -> TrainBatch:
    equal = tuple(dataclasses.replace(s, advantage=0.0, is_equal=True) for s in batch.sequences)
    return dataclasses.replace(batch, sequences=equal)


@pytest.mark.parametrize("top_k", [0, 4])
def test_the_reported_gap_is_the_mean_over_tokens(
    model_folder: Path, teacher_folder: Path, make_batch: MakeBatch, top_k: int
) -> None:
    batch = without_rewards(make_batch(1))
    one = student(model_folder, teacher_folder, teacher_top_k=top_k, aggregation="token")
    found = one.train_step(batch).values
    total, count = 0.0, 0.0
    for s, mine, theirs in zip(
        batch.sequences, plain(model_folder, batch), plain(teacher_folder, batch), strict=True
    ):
        tokens = torch.from_numpy(s.tokens[s.prompt_len :].astype(np.int64))[:, None]
        if top_k == 0:
            gap = (mine - theirs).gather(1, tokens).squeeze(1)
        else:
            ids = theirs.topk(top_k, -1).indices
            p, t = mine.gather(1, ids), theirs.gather(1, ids)
            rest, teacher_rest = 1 - p.exp().sum(1), 1 - t.exp().sum(1)
            gap = (p.exp() * (p - t)).sum(1) + rest * (rest.log() - teacher_rest.log())
        total += (gap * torch.from_numpy(s.mask)).sum().item()
        count += float(s.mask.sum())
    assert found["teacher_kl"] == pytest.approx(total / count, rel=1e-4)
    assert found["policy_gradient_expected"] == (1.0 if top_k == 0 else 0.0)
    assert found["total_grad_norm"] > 0


def test_the_teachers_own_weights_leave_nothing_to_learn(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    for top_k in (0, 4):
        one = student(model_folder, model_folder, teacher_top_k=top_k)
        values = one.train_step(without_rewards(make_batch(1))).values
        assert values["teacher_kl"] == pytest.approx(0, abs=1e-6)
        assert values["total_grad_norm"] < 1e-5


def test_a_student_comes_near_its_teacher(
    model_folder: Path, teacher_folder: Path, make_batch: MakeBatch
) -> None:
    one = student(model_folder, teacher_folder, teacher_top_k=8)
    gaps = [
        one.train_step(dataclasses.replace(without_rewards(make_batch(1)), update=u)).values[
            "teacher_kl"
        ]
        for u in range(1, 16)
    ]
    assert gaps[-1] < 0.5 * gaps[0]


def test_another_vocabulary_is_refused(model_folder: Path, tmp_path: Path) -> None:
    Qwen3ForCausalLM(tiny_config(vocab_size=64)).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="a vocabulary of 64, the student has 61"):
        student(model_folder, tmp_path / "other")
