"""Token losses on packed tensors. Pure: no model, no ranks, no state.

Legend: T response tokens of whole sequences, one after another; S sequences among them. A masked
token (``active_T`` False) adds exactly 0 to every value and every gradient, whatever it holds, NaN
included.

Nothing here divides by a count of its own: ``token_weights`` spreads the normalisation of the whole
optimizer batch over its tokens first, so a loss does not depend on how the batch was packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.loss import Aggregation
from runtime.trainer.settings import KlKind, LossSettings

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 5e8 still has room for a square in fp32."""
KL_LIMIT = 10.0
_LEAST_REST = 1e-7


def token_weights(
    aggregation: Aggregation,
    active_per_sequence_S: NDArray[np.int64],
    *,
    max_response_tokens: int,
) -> NDArray[np.float64]:
    """Weight of one active token of each sequence, over a whole optimizer batch.

    Args:
        aggregation: "sample": token mean per sample, mean over samples; "token": mean over all
            active tokens; "constant": token sum over (samples x ``max_response_tokens``).
        active_per_sequence_S: [S] number of active tokens; a sequence may have none. It still
            counts as a sample.
        max_response_tokens: used by "constant" only.

    Returns:
        float64 [S]. The loss is the sum over active tokens of weight x token loss.

    Source: Shao et al. 2024 (sample), Yu et al. 2025 (DAPO, token), Liu et al. 2025 (Dr. GRPO,
    constant).
    """
    counts = active_per_sequence_S.astype(np.float64)
    if counts.size == 0:
        return counts
    if aggregation == "sample":
        return 1.0 / (np.maximum(counts, 1.0) * counts.size)
    if aggregation == "token":
        return np.full(counts.shape, 1.0 / max(counts.sum(), 1.0))
    return np.full(counts.shape, 1.0 / (counts.size * max_response_tokens))


def only_active(value_T: Tensor, active_T: Tensor) -> Tensor:
    """``value_T`` with masked tokens set to 0, which also stops their gradient."""
    return torch.where(active_T, value_T, value_T.new_zeros(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Which tokens train, and which sequence each one belongs to."""

    active_T: Tensor
    """bool"""
    seq_T: Tensor
    """int64, in [0, num_sequences)"""
    num_sequences: int

    def sum(self, value_T: Tensor) -> Tensor:
        """Sum over each sequence's tokens, [S]; ``value_T`` is 0 at masked ones."""
        return value_T.new_zeros(self.num_sequences).index_add(0, self.seq_T, value_T)

    def mean(self, value_T: Tensor) -> Tensor:
        """Mean over each sequence's active tokens, [S]; 0 for a sequence without any."""
        return self.sum(value_T) / self.sum(self.active_T.to(value_T.dtype)).clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy term, token by token, before weights."""

    loss_T: Tensor
    clipped_T: Tensor
    """bool: the clip decided this token's value, so it has no gradient (dual clip included)."""


def policy_loss(
    settings: LossSettings,
    segments: Segments,
    *,
    logprob_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
) -> PolicyLoss:
    """Clipped surrogate, or plain REINFORCE.

    Args:
        settings: ratio kind and clips.
        segments: which tokens are active, and whose they are.
        logprob_T: [T] under the weights being trained; carries the gradient.
        old_T: [T] log-probs of the old policy, detached; not read without a ratio.
        advantage_T: [T], detached.

    Source: Schulman et al. 2017 (clip), Ye et al. 2020 (dual clip), Yu et al. 2025 (higher upper
    clip), Zheng et al. 2025 (GSPO, sequence ratio), Williams 1992 (REINFORCE).
    """
    active_T = segments.active_T
    logprob_T = only_active(logprob_T, active_T)
    advantage_T = only_active(advantage_T, active_T)
    if settings.ratio == "none":
        return PolicyLoss(-advantage_T * logprob_T, torch.zeros_like(active_T))
    log_ratio_T = logprob_T - only_active(old_T, active_T)
    if settings.ratio == "sequence":
        log_ratio_T = segments.mean(log_ratio_T)[segments.seq_T]
    ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    kept_T = ratio_T.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high)
    free_loss_T, kept_loss_T = -advantage_T * ratio_T, -advantage_T * kept_T
    loss_T = torch.maximum(free_loss_T, kept_loss_T)
    clipped_T = kept_loss_T > free_loss_T
    if settings.dual_clip is not None:
        bound_T = -advantage_T * settings.dual_clip
        beyond_T = (advantage_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(beyond_T, bound_T, loss_T)
        clipped_T = clipped_T | beyond_T
    return PolicyLoss(only_active(loss_T, active_T), clipped_T & active_T)


def kl_estimate(
    kind: KlKind, *, logprob_T: Tensor, reference_T: Tensor, active_T: Tensor
) -> Tensor:
    """KL(policy || reference) estimated at the sampled tokens, clamped to [-10, 10].

    k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r with r = policy - reference log-prob; k3 >= 0.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    r_T = only_active(logprob_T, active_T) - only_active(reference_T, active_T)
    if kind == "k1":
        value_T = r_T
    elif kind == "k2":
        value_T = 0.5 * r_T.square()
    elif kind == "k3":
        inverse_T = -r_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        value_T = torch.expm1(inverse_T) - inverse_T
    else:
        raise ValueError(f"no estimator {kind!r}")
    return value_T.clamp(-KL_LIMIT, KL_LIMIT)


def distilled_advantage(
    advantage_T: Tensor, *, coef: float, student_T: Tensor, teacher_T: Tensor, active_T: Tensor
) -> Tensor:
    """Advantage less coef x (student - teacher log-prob) at the sampled tokens.

    The difference, clamped to +-20, is the reverse KL to the teacher as one sample estimates it.

    Source: Agarwal et al. 2023 (GKD, on-policy, reverse KL); as a reward per token: Lu et al. 2025
    (On-Policy Distillation).
    """
    gap_T = only_active(student_T, active_T) - only_active(teacher_T, active_T)
    return advantage_T - coef * gap_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bucketed_reverse_kl(student_TK: Tensor, teacher_TK: Tensor, active_T: Tensor) -> Tensor:
    """KL(student || teacher) per token [T] over K tokens and one bucket for all others; >= 0.

    Merging outcomes only lowers a KL, so this is a lower bound of the one over the vocabulary. A
    bucket holds at least 1e-7, so that its log exists.

    Args:
        student_TK: log-probs under the weights being trained; carries the gradient.
        teacher_TK: log-probs of the same K distinct tokens, the teacher's likeliest.
        active_T: masked tokens give 0.

    Source: Gu et al. 2023 (MiniLLM) for the direction; the bucket keeps both sides distributions.
    """
    keep_T1 = active_T[:, None]
    student_TK, teacher_TK = only_active(student_TK, keep_T1), only_active(teacher_TK, keep_T1)
    p_TK = student_TK.exp()
    rest_T = (1.0 - p_TK.sum(1)).clamp(min=_LEAST_REST)
    teacher_rest_T = (1.0 - teacher_TK.exp().sum(1)).clamp(min=_LEAST_REST)
    inside_T = (p_TK * (student_TK - teacher_TK)).sum(1)
    return only_active(inside_T + rest_T * (rest_T.log() - teacher_rest_T.log()), active_T)


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Truncated importance sampling: what engine and trainer disagree about, as a weight."""

    weight_T: Tensor
    """What multiplies the policy term; 0 at masked tokens."""
    raw_T: Tensor
    """Before truncation or masking; 1 at masked tokens."""
    outside_T: Tensor
    """bool: beyond the bounds."""


@torch.no_grad()
def importance_weights(
    settings: LossSettings,
    segments: Segments,
    *,
    train_T: Tensor,
    behaviour_T: Tensor,
) -> ImportanceWeights:
    """Weights exp(train - behaviour), per token or per sequence (sum of the log-ratios).

    Args:
        settings: bounds, level, mode. With ``tis`` off the weights are 1 and nothing is outside.
        segments: which tokens are active, and whose they are.
        train_T: [T] the trainer's log-probs before the first step on the collection.
        behaviour_T: [T] the engine's.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training" (truncate); the mask form is IcePop (Ling team 2025).
    """
    active_T = segments.active_T
    log_ratio_T = only_active(train_T, active_T) - only_active(behaviour_T, active_T)
    if settings.tis_level == "sequence":
        log_ratio_T = segments.sum(log_ratio_T)[segments.seq_T]
    raw_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    raw_T = torch.where(active_T, raw_T, torch.ones_like(raw_T))
    if not settings.tis:
        return ImportanceWeights(active_T.to(raw_T.dtype), raw_T, torch.zeros_like(active_T))
    outside_T = active_T & ((raw_T < settings.tis_clip_low) | (raw_T > settings.tis_clip))
    if settings.tis_mode == "truncate":
        weight_T = raw_T.clamp(settings.tis_clip_low, settings.tis_clip)
    else:
        weight_T = torch.where(outside_T, torch.zeros_like(raw_T), raw_T)
    return ImportanceWeights(only_active(weight_T, active_T), raw_T, outside_T)


def effective_sample_share(raw_T: Tensor, active_T: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) over active tokens: 1 when all weights are equal; 1 without tokens.

    Source: Kong 1992.
    """
    w_T = raw_T[active_T].double()
    if w_T.numel() == 0:
        return 1.0
    return (w_T.sum().square() / (w_T.numel() * w_T.square().sum())).item()


def kl_train_behaviour(train_T: Tensor, behaviour_T: Tensor, active_T: Tensor) -> float:
    """KL(train || behaviour) from tokens that the behaviour policy sampled; >= 0.

    Mean of w log w - (w - 1) with w = train / behaviour: the expectation of w log w under the
    behaviour policy is the KL in this direction, and w - 1, whose expectation is 0, keeps each term
    positive (the k3 trick of Schulman 2020 for the other direction).
    """
    log_w_T = (train_T[active_T].double() - behaviour_T[active_T].double()).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    if log_w_T.numel() == 0:
        return 0.0
    return (log_w_T.exp() * log_w_T - torch.expm1(log_w_T)).mean().item()
