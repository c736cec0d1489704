"""Losses against a reference in plain float arithmetic, token by token."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from runtime.trainer import losses
from runtime.trainer.losses import Segments
from runtime.trainer.objective import TokenInputs, objective
from runtime.trainer.settings import LossSettings

no_deadline = settings(deadline=None, max_examples=60)  # other work shares the cores

NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "reinforce")
logprobs = st.floats(-30, 0)


@st.composite
def tokens(draw: DrawFn) -> list[list[dict[str, float]]]:
    """Sequences of tokens, each with all that a loss reads."""
    token = st.fixed_dictionaries(
        {
            "now": logprobs,
            "old": logprobs,
            "behaviour": logprobs,
            "reference": logprobs,
            "advantage": st.floats(-3, 3),
            "active": st.sampled_from([1.0, 1.0, 1.0, 0.0]),
        }
    )
    return draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=6))


settings_of_a_loss = st.builds(
    lambda name, dual, level, mode, low, kl, coef, entropy: LossSettings.named(
        name,
        dual_clip=dual,
        tis_level=level,
        tis_mode=mode,
        tis_clip_low=low,
        kl=kl,
        kl_coef=coef,
        entropy_coef=entropy,
        max_response_tokens=9,
    ),
    st.sampled_from(NAMES),
    st.sampled_from([None, 1.5, 3.0]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.01]),
)


def pack(sequences: list[list[dict[str, float]]], key: str) -> torch.Tensor:
    return torch.tensor([t[key] for s in sequences for t in s], dtype=torch.float64)


def segments_of(sequences: list[list[dict[str, float]]]) -> Segments:
    return Segments(
        active_T=pack(sequences, "active") > 0,
        seq_T=torch.tensor([i for i, s in enumerate(sequences) for _ in s]),
        num_sequences=len(sequences),
    )


def inputs_of(
    sequences: list[list[dict[str, float]]], settings: LossSettings, weight_S: np.ndarray
) -> TokenInputs:
    segments = segments_of(sequences)
    return TokenInputs(
        segments=segments,
        weight_T=torch.from_numpy(weight_S)[segments.seq_T],
        advantage_T=pack(sequences, "advantage"),
        behaviour_T=pack(sequences, "behaviour"),
        old_T=pack(sequences, "old"),
        train_T=pack(sequences, "old"),
        reference_T=pack(sequences, "reference"),
    )


def weights_of(sequences: list[list[dict[str, float]]], settings: LossSettings) -> np.ndarray:
    counts = np.array([int(sum(t["active"] for t in s)) for s in sequences], dtype=np.int64)
    return losses.token_weights(
        settings.aggregation, counts, max_response_tokens=settings.max_response_tokens
    )


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def reference_loss(sequences: list[list[dict[str, float]]], c: LossSettings) -> float:
    """The loss as one would write it on paper."""
    total_active = sum(t["active"] for s in sequences for t in s)
    loss = 0.0
    for s in sequences:
        active = [t for t in s if t["active"]]
        sequence_terms: list[float] = []
        if not active:
            continue
        mean_log_ratio = sum(t["now"] - t["old"] for t in active) / len(active)
        for t in active:
            a = t["advantage"]
            if c.ratio == "none":
                policy = -a * t["now"]
            else:
                log_ratio = mean_log_ratio if c.ratio == "sequence" else t["now"] - t["old"]
                ratio = math.exp(clamp(log_ratio, -20, 20))
                kept = clamp(ratio, 1 - c.eps_clip, 1 + c.eps_clip_high)
                policy = max(-a * ratio, -a * kept)
                if c.dual_clip and a < 0:
                    policy = min(policy, -a * c.dual_clip)
            log_w = t["old"] - t["behaviour"]
            if c.tis_level == "sequence":
                log_w = sum(x["old"] - x["behaviour"] for x in active)
            w = math.exp(clamp(log_w, -20, 20))
            if c.tis_mode == "mask":
                w = w if c.tis_clip_low <= w <= c.tis_clip else 0.0
            else:
                w = clamp(w, c.tis_clip_low, c.tis_clip)
            r = t["now"] - t["reference"]
            r_limited = clamp(r, -20, 20)
            kl = {"k1": r, "k2": r * r / 2, "k3": math.exp(-r_limited) - 1 + r_limited}[c.kl]
            sequence_terms.append(
                w * policy + c.kl_coef * clamp(kl, -10, 10) - c.entropy_coef * 2.0
            )
        if c.aggregation == "sample":
            loss += sum(sequence_terms) / len(active) / len(sequences)
        elif c.aggregation == "token":
            loss += sum(sequence_terms) / total_active
        else:
            loss += sum(sequence_terms) / (len(sequences) * c.max_response_tokens)
    return loss


@no_deadline
@given(tokens(), settings_of_a_loss)
def test_objective_equals_the_formula_on_paper(
    sequences: list[list[dict[str, float]]], settings: LossSettings
) -> None:
    now = pack(sequences, "now")
    result = objective(
        settings,
        logprob_T=now,
        entropy_T=torch.full_like(now, 2.0),
        inputs=inputs_of(sequences, settings, weights_of(sequences, settings)),
    )
    want = reference_loss(sequences, settings)
    assert result.loss.item() == pytest.approx(want, rel=1e-9, abs=1e-9)


@no_deadline
@given(tokens(), settings_of_a_loss, st.randoms(use_true_random=False))
def test_any_split_of_the_batch_gives_the_same_gradient(
    sequences: list[list[dict[str, float]]], settings: LossSettings, random: object
) -> None:
    weight_S = weights_of(sequences, settings)

    def gradient(parts: list[list[int]]) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for part in parts:
            chosen = [sequences[i] for i in part]
            now = pack(chosen, "now").requires_grad_()
            entropy = torch.ones_like(now)
            inputs = inputs_of(chosen, settings, weight_S[part])
            objective(settings, logprob_T=now, entropy_T=entropy, inputs=inputs).loss.backward()
            assert now.grad is not None
            at = 0
            for i in part:
                found[i] = now.grad[at : at + len(sequences[i])].tolist()
                at += len(sequences[i])
        return [found[i] for i in range(len(sequences))]

    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    cut = random.randint(0, len(order))  # type: ignore[attr-defined]
    parts = [part for part in (order[:cut], order[cut:]) if part]
    for whole, split in zip(gradient([order]), gradient(parts), strict=True):
        assert split == pytest.approx(whole, rel=1e-9, abs=1e-12)


@no_deadline
@given(tokens(), settings_of_a_loss, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_tokens_add_nothing_whatever_they_hold(
    sequences: list[list[dict[str, float]]], settings: LossSettings, poison: float
) -> None:
    def run(poisoned: bool) -> tuple[float, torch.Tensor]:
        columns = {
            key: torch.where(
                segments_of(sequences).active_T | torch.tensor(not poisoned),
                pack(sequences, key),
                torch.tensor(poison, dtype=torch.float64),
            )
            for key in ("now", "old", "behaviour", "reference", "advantage")
        }
        inputs = replace(
            inputs_of(sequences, settings, weights_of(sequences, settings)),
            old_T=columns["old"],
            train_T=columns["old"],
            behaviour_T=columns["behaviour"],
            reference_T=columns["reference"],
            advantage_T=columns["advantage"],
        )
        now = columns["now"].requires_grad_()
        result = objective(
            settings, logprob_T=now, entropy_T=columns["now"].detach(), inputs=inputs
        )
        result.loss.backward()
        assert now.grad is not None
        return result.loss.item(), now.grad

    clean, poisoned = run(False), run(True)
    assert poisoned[0] == pytest.approx(clean[0], rel=1e-12, abs=1e-12)
    assert torch.equal(poisoned[1], clean[1])
    assert not poisoned[1][~segments_of(sequences).active_T].any()


@no_deadline
@given(st.lists(st.floats(-1e4, 0), min_size=1, max_size=8), st.sampled_from(NAMES))
def test_the_furthest_ratio_stays_finite(values: list[float], name: str) -> None:
    now = torch.tensor(values).requires_grad_()
    segments = Segments(
        active_T=torch.ones(len(values), dtype=torch.bool),
        seq_T=torch.zeros(len(values), dtype=torch.int64),
        num_sequences=1,
    )
    result = losses.policy_loss(
        LossSettings.named(name),  # type: ignore[arg-type]
        segments,
        logprob_T=now,
        old_T=torch.linspace(-1e4, 0, len(values)),
        advantage_T=torch.linspace(-1, 1, len(values)),
    )
    result.loss_T.sum().backward()
    assert torch.isfinite(result.loss_T).all()
    assert now.grad is not None
    assert torch.isfinite(now.grad).all()


@no_deadline
@given(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=20))
def test_k3_and_the_engine_kl_are_never_negative(pairs: list[tuple[float, float]]) -> None:
    now = torch.tensor([a for a, _ in pairs], dtype=torch.float64)
    other = torch.tensor([b for _, b in pairs], dtype=torch.float64)
    active = torch.ones(len(pairs), dtype=torch.bool)
    k3 = losses.kl_estimate("k3", logprob_T=now, reference_T=other, active_T=active)
    assert (k3 >= 0).all()
    assert (k3 <= losses.KL_LIMIT).all()
    assert losses.kl_train_behaviour(now, other, active) >= -1e-12


def test_unclipped_positive_advantage_is_clipped_above_only() -> None:
    settings = LossSettings.named("dapo")
    segments = Segments(
        active_T=torch.ones(4, dtype=torch.bool), seq_T=torch.arange(4), num_sequences=4
    )
    old = torch.zeros(4, dtype=torch.float64)
    now = torch.log(torch.tensor([1.4, 0.5, 1.4, 0.5], dtype=torch.float64)).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    result = losses.policy_loss(settings, segments, logprob_T=now, old_T=old, advantage_T=advantage)
    assert result.clipped_T.tolist() == [True, False, False, True]
    assert result.loss_T.tolist() == pytest.approx([-1.28, -0.5, 1.4, 0.8])
    result.loss_T.sum().backward()
    assert now.grad is not None
    assert (now.grad == 0).tolist() == result.clipped_T.tolist()


def test_fresh_policy_has_loss_zero_and_a_gradient() -> None:
    # Centred advantages cancel in the sum, not in the gradient: a loss of 0 is no alarm.
    now = torch.tensor([-1.0, -2.0], dtype=torch.float64).requires_grad_()
    segments = Segments(
        active_T=torch.ones(2, dtype=torch.bool), seq_T=torch.arange(2), num_sequences=2
    )
    loss = losses.policy_loss(
        LossSettings.named("grpo"),
        segments,
        logprob_T=now,
        old_T=now.detach(),
        advantage_T=torch.tensor([0.7, -0.7], dtype=torch.float64),
    ).loss_T.sum()
    loss.backward()
    assert loss.item() == 0
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-0.7, 0.7])


@no_deadline
@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=30))
def test_effective_sample_share_lies_between_one_token_and_all(weights: list[float]) -> None:
    raw = torch.tensor(weights, dtype=torch.float64)
    share = losses.effective_sample_share(raw, torch.ones(len(weights), dtype=torch.bool))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_effective_sample_share_is_one_for_equal_weights_only() -> None:
    active = torch.tensor([True, True, True, False])
    even = losses.effective_sample_share(torch.tensor([2.0, 2.0, 2.0, 9.0]), active)
    assert even == pytest.approx(1.0)
    assert losses.effective_sample_share(torch.tensor([1.0, 0.0, 0.0, 1.0]), active) < 0.34


@no_deadline
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.sampled_from(["sample", "token", "constant"]),
)
def test_weights_of_a_batch_add_up_to_its_normalisation(counts: list[int], kind: str) -> None:
    active = np.array(counts, dtype=np.int64)
    weights = losses.token_weights(kind, active, max_response_tokens=50)  # type: ignore[arg-type]
    total = float((weights * active).sum())
    want = {
        "sample": np.mean(active > 0),
        "token": float(active.sum() > 0),
        "constant": active.sum() / (len(counts) * 50),
    }[kind]
    assert total == pytest.approx(want)
