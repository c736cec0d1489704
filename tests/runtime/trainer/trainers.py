"""Trainers of the tiny model, and what lies inside them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.update import Machinery

MakeBatch = Callable[..., TrainBatch]


def trainer(folder: Path, **changes: object) -> TorchTrainer:
    base = TrainerSettings(optimizer=OptimizerSettings(lr=1e-3), max_mean_logprob_gap=1e-4)
    made = TorchTrainer(dataclasses.replace(base, **changes))  # type: ignore[arg-type]
    made.load(str(folder))
    return made


def machinery(one: TorchTrainer) -> Machinery:
    found = one._machinery
    assert found is not None
    return found


def parameters(one: TorchTrainer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in one.export_weights(1 << 30) for n, t in bucket}
