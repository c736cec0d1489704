"""Compiled layers of models unlike each other in one process, against the same ones uncompiled.

By a backend that makes no machine code: which graph serves which model is decided before it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from transformers import Qwen3ForCausalLM

from runtime.telemetry.events import Event
from runtime.trainer.flat import flatten
from runtime.trainer.settings import LoraSettings, LossSettings, TrainerSettings
from runtime.trainer.torch import backend
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.compiled import compile_layers, kind_of
from runtime.trainer.torch.packer import score
from tests.runtime.trainer.tiny import make_sequences, tiny_config

pytestmark = pytest.mark.timeout(240)

# What gives the policy adapters and norms that train, and a reference that has neither.
UNLIKE = TrainerSettings(
    loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1, teacher_coef=0.5),
    lora=LoraSettings(rank=4, also=("*q_norm*",)),
    max_mean_logprob_gap=1e9,
)
SEQUENCES = make_sequences(5, groups=2, samples=2)


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compile_layers", partial(compile_layers, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()


@pytest.fixture(scope="module", params=["rms_norm_eps", "intermediate_size"])
def unlike_teacher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The student's hidden size; a graph of the student would run, or nearly."""
    value = {"rms_norm_eps": 0.3, "intermediate_size": 96}[request.param]
    folder = tmp_path_factory.mktemp("unlike")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        Qwen3ForCausalLM(tiny_config(**{request.param: value})).save_pretrained(folder)
    return str(folder)


def loaded(model: Path, settings: TrainerSettings) -> TorchTrainer:
    """A trainer whose adapters count."""
    trainer = TorchTrainer(settings)
    trainer.load(str(model))
    machinery = trainer._machinery
    assert machinery is not None
    numbers = torch.Generator().manual_seed(3)
    for name, master in zip(machinery.weights.names, machinery.weights.masters, strict=True):
        if name.endswith("lora_B"):
            master.data.copy_(0.2 * torch.randn(master.shape, generator=numbers))
    machinery.weights.masters_changed()
    return trainer


def scores(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    machinery = trainer._machinery
    assert machinery is not None
    models = {
        "reference": machinery.reference,
        "policy": machinery.weights.scorer,
        "teacher": machinery.teacher,
    }
    offset_S = flatten(SEQUENCES).offset_S
    return {
        name: score(scorer, machinery.packer, SEQUENCES, offset_S)
        for name, scorer in models.items()
        if scorer is not None
    }


def test_models_unlike_each_other_have_graphs_of_their_own(
    model_folder: Path, unlike_teacher: str, without_code: None
) -> None:
    settings = replace(UNLIKE, teacher=unlike_teacher)
    expected = scores(loaded(model_folder, settings))
    found = scores(loaded(model_folder, replace(settings, compile=True)))
    assert expected.keys() == found.keys() == {"reference", "policy", "teacher"}
    for name, alone in expected.items():
        torch.testing.assert_close(found[name], alone, atol=1e-4, rtol=1e-4, msg=name)
    assert (expected["policy"] - expected["reference"]).abs().max() > 0.1
    # Inner functions, compiled by themselves, would be shared again.
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


def test_layers_of_one_kind_share_their_graphs(model_folder: Path, without_code: None) -> None:
    settings = TrainerSettings(compile=True)
    trainers = [loaded(model_folder, settings) for _ in range(2)]
    made: list[int] = []
    for trainer in trainers:
        scores(trainer)
        made.append(counters["stats"]["unique_graphs"])
    assert made[0] == made[1] > 0
    machinery = trainers[0]._machinery
    assert machinery is not None
    first, second = machinery.weights.scorer.layers
    assert kind_of(first) == kind_of(second)
    second.requires_grad_(False)
    assert kind_of(first) != kind_of(second)
    second.requires_grad_(True)
    weight = first.get_parameter("mlp.down_proj.weight")
    weight.data = weight.data.t().contiguous().t()  # equal, and lies otherwise
    assert kind_of(first) != kind_of(second)


def test_what_is_no_longer_compiled_is_logged(
    model_folder: Path, without_code: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = loaded(model_folder, TrainerSettings(compile=True))
    assert dynamo_config.recompile_limit == 64
    monkeypatch.setattr(dynamo_config, "recompile_limit", 1)
    expected = loaded(model_folder, TrainerSettings()).score(SEQUENCES, temperature=1.0)
    with capture_logs() as logs:
        for sequences in (SEQUENCES[:1], SEQUENCES):  # a row of one sequence, then of several
            found = trainer.score(sequences, temperature=1.0)
    for mine, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-4, rtol=1e-4)
    assert {line["event"] for line in logs} == {Event.LIBRARY_WARNED}
    assert any("recompile_limit (1)" in line["message"] for line in logs)
