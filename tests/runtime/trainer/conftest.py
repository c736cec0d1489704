from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from runtime.trainer.protocol import TrainBatch
from tests.runtime.trainer.tiny import make_sequences, tiny_config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, wide enough apart that wrong attention shows in the log-probs."""
    return _saved(tmp_path_factory.mktemp("tiny"), seed=7)


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return _saved(tmp_path_factory.mktemp("teacher"), seed=8)


def _saved(folder: Path, *, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(tiny_config()).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    def make(update: int, *, seed: int | None = None, **sizes: object) -> TrainBatch:
        sequences = make_sequences(update if seed is None else seed, **sizes)  # type: ignore[arg-type]
        return TrainBatch(update=update, sequences=sequences, consumed_digest=f"digest-{update}")

    return make
