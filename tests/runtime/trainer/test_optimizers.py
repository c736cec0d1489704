"""SGD and Muon: torch's own steps, on one rank and more, in a commit and out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import PartialWrite
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LoraSettings, LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.ranks import Ranks
from tests.runtime.trainer.test_ranks import Job, figures, gap, run, run_ranks

pytestmark = pytest.mark.timeout(240)

MakeBatch = Callable[..., TrainBatch]
SGD = OptimizerSettings(
    kind="sgd", lr=1e-2, momentum=0.9, weight_decay=0.1, undecayed=("*norm.weight",)
)
MUON = OptimizerSettings(
    kind="muon", lr=3e-3, momentum=0.95, weight_decay=0.1, lr_scale=(("*down_proj*", 0.5),)
)
KINDS = pytest.mark.parametrize("optimizer", [SGD, MUON], ids=lambda o: o.kind)
SETTINGS = TrainerSettings(
    loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1, entropy_coef=0.01),
    max_tokens_per_bin=40,
    updates_per_collection=2,
    max_mean_logprob_gap=1.0,
)
EMBEDDING = "model.embed_tokens.weight"


def settings(optimizer: OptimizerSettings, **changes: object) -> TrainerSettings:
    return replace(SETTINGS, optimizer=optimizer, **changes)  # type: ignore[arg-type]


def trainer(folder: Path, optimizer: OptimizerSettings, **changes: object) -> TorchTrainer:
    made = TorchTrainer(settings(optimizer, **changes))
    made.load(str(folder))
    return made


def exported(one: TorchTrainer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in one.export_weights(1 << 30) for n, t in bucket}


class Recorder:
    """The masters before a step and the clipped gradients it was made of."""

    def __init__(self, one: TorchTrainer) -> None:
        self.weights = one._ready.weights  # pyright: ignore[reportPrivateUsage]
        self.before: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []
        placed = self.weights.place_gradients

        def place() -> None:
            placed()
            names, masters = self.weights.names, self.weights.masters
            pairs = list(zip(names, masters, strict=True))
            self.before.append({n: m.detach().clone() for n, m in pairs})
            self.gradients.append({n: None if m.grad is None else m.grad.clone() for n, m in pairs})

        self.weights.place_gradients = place  # type: ignore[method-assign]

    def clipped(self, at: int, max_norm: float) -> dict[str, torch.Tensor]:
        found = {n: g for n, g in self.gradients[at].items() if g is not None}
        norm = math.sqrt(sum(g.double().square().sum().item() for g in found.values()))
        factor = max_norm / (norm + 1e-6) if norm > max_norm else 1.0
        return {n: g * factor for n, g in found.items()}


def test_sgd_is_what_its_formula_says(model_folder: Path, make_batch: MakeBatch) -> None:
    """buffer = momentum x buffer + gradient; weight = (1 - lr x decay) x weight - lr x buffer."""
    one = trainer(model_folder, SGD)
    recorder = Recorder(one)
    for update in (2, 4):
        one.train_step(make_batch(update))
    want = {n: t.double() for n, t in recorder.before[0].items()}
    buffers = {n: torch.zeros_like(t) for n, t in want.items()}
    for at in range(len(recorder.before)):
        for name, gradient in recorder.clipped(at, SGD.max_grad_norm).items():
            buffers[name] = SGD.momentum * buffers[name] + gradient.double()
            decay = 0.0 if name.endswith("norm.weight") else SGD.weight_decay
            want[name] = (1 - SGD.lr * decay) * want[name] - SGD.lr * buffers[name]
    found = exported(one)
    for name, weight in want.items():
        torch.testing.assert_close(found[name].double(), weight, atol=1e-6, rtol=1e-5, msg=name)


def test_muon_turns_matrices_and_leaves_the_rest_to_adamw(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = trainer(model_folder, replace(MUON, weight_decay=0.0))
    adamw = trainer(model_folder, replace(MUON, kind="adamw", weight_decay=0.0))
    before = exported(one)
    one.train_step(make_batch(2, groups=2))
    adamw.train_step(make_batch(2, groups=2))
    for name, weight in exported(one).items():
        change = weight - before[name]
        if weight.dim() < 2 or name == EMBEDDING:
            continue
        # All directions are moved about alike: AdamW's steps have some that are far larger.
        values = torch.linalg.svdvals(change.float())
        rank = int((values > 1e-3 * values[0]).sum())
        assert values[0] < 6.0 * values[rank // 2], name
        size = change.square().mean().sqrt().item()
        rate = MUON.lr * (0.5 if "down_proj" in name else 1.0)
        assert 0.02 * rate < size < 2.0 * rate, f"{name}: as large as steps of AdamW"
    kept = one._ready.optimizer.state()  # pyright: ignore[reportPrivateUsage]
    names = one._ready.weights.names  # pyright: ignore[reportPrivateUsage]
    for name, state in zip(names, kept, strict=True):
        is_matrix = before[name].dim() == 2 and name != EMBEDDING
        assert set(state) == ({"momentum"} if is_matrix else {"exp_avg", "exp_avg_sq"}), name


@KINDS
def test_a_run_resumed_from_a_commit_is_the_same_run(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path, optimizer: OptimizerSettings
) -> None:
    one = trainer(model_folder, optimizer)
    for update in (2, 4):
        one.train_step(make_batch(update))
    one.write_staged(one.stage().token, str(tmp_path))
    stored = load_file(tmp_path / "trainer-00000-of-00001.safetensors")
    assert any(n.startswith("momentum/") and t.any() for n, t in stored.items())
    assert any(n.startswith("exp_avg/") for n in stored) == (optimizer.kind == "muon")
    again = trainer(model_folder, optimizer, seed=9)
    again.restore(str(tmp_path))
    for update in (6, 8):
        mine, theirs = (t.train_step(make_batch(update)).values for t in (one, again))
        assert figures(theirs) == figures(mine)
    assert gap(exported(one), exported(again)) == 0

    other = trainer(model_folder, replace(optimizer, kind="adamw"))
    with pytest.raises(PartialWrite, match="exp_avg"):
        other.restore(str(tmp_path))


@KINDS
def test_the_same_seed_is_the_same_run(
    model_folder: Path, make_batch: MakeBatch, optimizer: OptimizerSettings
) -> None:
    runs = []
    for _ in range(2):
        one = trainer(model_folder, optimizer)
        values = [figures(one.train_step(make_batch(u)).values) for u in (2, 4)]
        runs.append((values, exported(one)))
    assert runs[0][0] == runs[1][0]
    assert gap(runs[0][1], runs[1][1]) == 0
    assert all(v["parameter_change_norm"] > 0 for v in runs[0][0])


@KINDS
def test_masters_beside_bfloat16_move_as_those_of_fp32(
    model_folder: Path, make_batch: MakeBatch, optimizer: OptimizerSettings
) -> None:
    """Steps are made in fp32 from the same numbers; only the passes are rounded."""
    fp32, bf16 = (trainer(model_folder, optimizer, dtype=d) for d in ("float32", "bfloat16"))
    start = exported(fp32)
    values = [t.train_step(make_batch(2)).values for t in (fp32, bf16)]
    masters = bf16._ready.weights  # pyright: ignore[reportPrivateUsage]
    found = {n: m.detach() for n, m in zip(masters.names, masters.masters, strict=True)}
    change = {n: t - start[n] for n, t in exported(fp32).items()}
    moved = {n: t - start[n] for n, t in found.items()}
    assert gap(change, moved) < 0.35
    assert values[1]["parameter_change_norm"] == pytest.approx(
        values[0]["parameter_change_norm"], rel=0.1
    )
    rounded = exported(bf16)
    assert all(torch.equal(rounded[n], t.bfloat16()) for n, t in found.items())


@KINDS
def test_a_gradient_that_is_not_finite_changes_nothing(
    model_folder: Path, make_batch: MakeBatch, optimizer: OptimizerSettings
) -> None:
    one = trainer(model_folder, optimizer)
    machinery = one._ready.optimizer  # pyright: ignore[reportPrivateUsage]
    before = exported(one)
    assert machinery.step(1, math.nan) is False
    assert machinery.num_steps == 0
    assert gap(before, exported(one)) == 0
    assert not any(t.any() for kept in machinery.state() for t in kept.values())


def test_adapters_are_matrices_of_muons(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    one = trainer(model_folder, MUON, lora=LoraSettings(rank=4, alpha=8.0))
    values = [one.train_step(make_batch(u)).values for u in (2, 4)]
    assert all(v["parameter_change_norm"] > 0 for v in values)
    one.write_staged(one.stage().token, str(tmp_path))
    stored = load_file(tmp_path / "trainer-00000-of-00001.safetensors")
    assert {n.partition("/")[0] for n in stored} == {"master", "momentum", "rng.cpu"}


def test_two_ranks_make_the_steps_of_one_and_read_its_state(
    model_folder: Path, tmp_path: Path
) -> None:
    """And one rank reads the state of two. Loss, gradient and weights over ten updates."""
    kinds = {"sgd": settings(SGD), "muon": settings(replace(MUON, lr=3e-4))}
    alone = {
        kind: run(Ranks(), model_folder, settings=made, save=tmp_path / f"{kind}-1")
        for kind, made in kinds.items()
    }
    jobs = [
        job
        for kind, made in kinds.items()
        for job in (
            Job(settings=made, save=tmp_path / f"{kind}-2"),
            Job(settings=made, start=tmp_path / f"{kind}-1"),
        )
    ]
    found = run_ranks(2, model_folder, jobs, tmp_path)
    for at, kind in enumerate(kinds):
        (fresh, second), (resumed, _) = found[2 * at], found[2 * at + 1]
        # torch turns Muon's matrices in bf16: the last bit of a sum of gradients is made larger.
        limit = {"sgd": 1e-5, "muon": 2e-4}[kind]
        for mine, theirs in zip(alone[kind].values, fresh.values, strict=True):
            for name in ("loss", "total_grad_norm", "entropy", "parameter_change_norm"):
                assert theirs[name] == pytest.approx(mine[name], rel=limit, abs=limit), (kind, name)
        assert gap(alone[kind].weights, fresh.weights) < 2e-5, kind
        assert gap(alone[kind].weights, resumed.weights) < 2e-5, kind
        assert gap(fresh.weights, second.weights) == 0, kind
        back = run(Ranks(), model_folder, settings=kinds[kind], start=tmp_path / f"{kind}-2")
        assert gap(fresh.weights, back.weights) < 2e-5, kind
