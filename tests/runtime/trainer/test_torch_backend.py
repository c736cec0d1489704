import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from runtime.errors import ContractViolation, UnavailableFeature
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.optimizer import learning_rate
from runtime.trainer.torch.packer import Packer
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.update import Machinery, Update

no_deadline = settings(deadline=None, max_examples=60)  # other work shares the cores

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
        torch.testing.assert_close(gradient.double(), expected, atol=2e-6, rtol=2e-4)


def test_same_seed_gives_identical_losses_and_weights(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    def run() -> tuple[list[float], dict[str, torch.Tensor]]:
        one = trainer(model_folder, deterministic=True)
        return [one.train_step(make_batch(u)).values["loss"] for u in (1, 2, 3)], parameters(one)

    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


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


def test_a_collection_makes_as_many_updates_as_the_run_file_says(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = trainer(model_folder, updates_per_collection=3)
    values = one.train_step(make_batch(3, groups=5)).values
    assert values["optimizer_steps"] == 3
    assert machinery(one).optimizer.num_steps == 3
    assert one.update == 3
    # Off-policy from the second step on, so ratios differ from 1 and the loss shows it.
    assert values["policy_loss"] != pytest.approx(
        trainer(model_folder).train_step(make_batch(1, groups=5)).values["policy_loss"], rel=1e-6
    )


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_groups_alone_have_no_policy_gradient(
    model_folder: Path, make_batch: MakeBatch, dtype: str
) -> None:
    one = trainer(model_folder, dtype=dtype)
    values = one.train_step(make_batch(1, groups=3, equal=(0, 1, 2))).values
    assert values["policy_gradient_expected"] == 0
    assert values["policy_grad_norm"] == 0
    assert values["total_grad_norm"] == 0
    assert (values["mixed_groups"], values["equal_groups"]) == (0, 3)
    assert values["parameter_change_norm"] == 0


def test_equal_groups_with_an_advantage_are_refused(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    batch = make_batch(1)
    wrong = dataclasses.replace(batch.sequences[0], is_equal=True, advantage=0.5)
    with pytest.raises(ContractViolation, match="equal rewards has advantage"):
        trainer(model_folder).train_step(
            dataclasses.replace(batch, sequences=(wrong, *batch.sequences[1:]))
        )


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


def test_kl_in_the_reward_moves_equal_groups(model_folder: Path, make_batch: MakeBatch) -> None:
    loss = LossSettings.named("grpo", kl="k1", kl_reward_coef=0.5)
    one = trainer(model_folder, loss=loss)
    one.train_step(make_batch(1))
    values = one.train_step(make_batch(2, equal=(0, 1, 2, 3))).values
    assert values["policy_gradient_expected"] == 1
    assert values["policy_grad_norm"] > 0


def poisoned(batch: TrainBatch) -> TrainBatch:
    broken = dataclasses.replace(batch.sequences[0], advantage=math.inf)
    return dataclasses.replace(batch, sequences=(broken, *batch.sequences[1:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_skips_the_step(
    model_folder: Path, make_batch: MakeBatch, dtype: str
) -> None:
    one = trainer(model_folder, max_skipped_steps=1, dtype=dtype)
    before = parameters(one)
    values = one.train_step(poisoned(make_batch(1))).values
    assert (values["skipped_steps"], values["skipped_steps_total"]) == (1, 1)
    assert values["optimizer_steps"] == 0
    assert values["parameter_change_norm"] == 0
    assert "total_grad_norm" not in values
    assert all(math.isfinite(v) for v in values.values())
    assert machinery(one).optimizer.num_steps == 0
    assert all(torch.equal(before[n], t) for n, t in parameters(one).items())
    assert one.train_step(make_batch(2)).values["skipped_steps"] == 0
    with pytest.raises(ContractViolation, match=r"2 step\(s\) skipped"):
        one.train_step(poisoned(make_batch(3)))


def test_updates_are_made_in_order(model_folder: Path, make_batch: MakeBatch) -> None:
    one = trainer(model_folder)
    with pytest.raises(ContractViolation, match="stands at update 0; a batch for 2 came"):
        one.train_step(make_batch(2))


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


def test_export_gives_every_weight_once_in_buckets(model_folder: Path) -> None:
    one = trainer(model_folder)
    specs = one.weight_specs()
    buckets = list(one.export_weights(3000))
    flat = [(name, tensor) for bucket in buckets for name, tensor in bucket]
    assert [name for name, _ in flat] == [spec.name for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs)
    assert "lm_head.weight" not in {spec.name for spec in specs}, "tied weights once"
    stored = Qwen3ForCausalLM.from_pretrained(model_folder).state_dict()
    for (name, tensor), spec in zip(flat, specs, strict=True):
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{spec.dtype}", spec.shape)
        assert torch.equal(tensor, stored[name])
    for bucket in buckets:
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 3000
    assert len(buckets) > 1


def test_bf16_keeps_fp32_masters(model_folder: Path, make_batch: MakeBatch) -> None:
    exact = trainer(model_folder)
    rounded = trainer(model_folder, dtype="bfloat16", max_mean_logprob_gap=0.05)
    for update in (1, 2, 3):
        a = exact.train_step(make_batch(update)).values
        b = rounded.train_step(make_batch(update)).values
        assert b["total_grad_norm"] == pytest.approx(a["total_grad_norm"], rel=0.1)
    weights = machinery(rounded).weights
    assert all(p.dtype == torch.bfloat16 for p in weights.params)
    for param, master in zip(weights.params, weights.masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(torch.bfloat16))
    # lr 1e-3 on weights near 1 is below half a bf16 step: only masters can have kept it.
    norms = [m for n, m in zip(weights.names, weights.masters, strict=True) if "norm" in n]
    assert any((m.detach() - 1).abs().max() > 1e-3 for m in norms)
    assert all(t.dtype == torch.bfloat16 for t in parameters(rounded).values())


def test_a_model_this_forward_would_get_wrong_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    model.config.use_sliding_window = True
    model.config.sliding_window = 4
    model.config.layer_types = ["full_attention", "sliding_attention"]
    model.save_pretrained(tmp_path / "sliding")
    with pytest.raises(UnavailableFeature, match="sliding_attention"):
        trainer(tmp_path / "sliding")


def test_checkpointed_activations_change_nothing(model_folder: Path, make_batch: MakeBatch) -> None:
    plain = trainer(model_folder).train_step(make_batch(1)).values
    recomputed = trainer(model_folder, activation_checkpointing=True)
    values = recomputed.train_step(make_batch(1)).values
    assert values["total_grad_norm"] == pytest.approx(plain["total_grad_norm"], rel=1e-6)


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


def test_reference_is_frozen_and_rounded_like_the_policy(model_folder: Path) -> None:
    one = trainer(
        model_folder, dtype="bfloat16", loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1)
    )
    reference = machinery(one).reference
    assert reference is not None
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in reference.parameters())
