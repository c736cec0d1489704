"""What must hold between trainer and engine, and within an optimizer step. Pure checks on figures.

Each function returns flat metrics; ``require_*`` raise with the numbers in the message. A figure
that could not be measured is absent, never 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ContractViolation
from runtime.trainer.flat import FlatCollection


def policy_agreement(
    flat: FlatCollection,
    train_R: NDArray[np.float32],
    measured_R: NDArray[np.bool_],
    *,
    current_update: int,
) -> dict[str, float]:
    """Gap |trainer - engine| of log-probs where both had the same weights.

    Args:
        flat: the collection.
        train_R: trainer's log-probs under the weights of ``current_update``.
        measured_R: where ``train_R`` holds such a log-prob.
        current_update: the policy being scored; only responses wholly of it count, prefill too.

    Returns:
        ``agreement/gap_mean``, ``gap_p99``, ``gap_max``, ``tokens``, ``responses``; empty when no
        response qualifies ("not measured").
    """
    whole_S = flat.wholly_of(current_update)
    chosen_R = whole_S[flat.seq_R] & flat.active_R & measured_R
    if not chosen_R.any():
        return {}
    gap = np.abs(train_R[chosen_R].astype(np.float64) - flat.behaviour_R[chosen_R])
    return {
        "agreement/gap_mean": float(gap.mean()),
        "agreement/gap_p99": float(np.quantile(gap, 0.99)),
        "agreement/gap_max": float(gap.max()),
        "agreement/tokens": float(gap.size),
        "agreement/responses": float(len(np.unique(flat.seq_R[chosen_R]))),
    }


def require_agreement(figures: dict[str, float], *, limit: float, update: int) -> None:
    """Refuse to train when the mean gap is above ``limit``; nothing measured passes.

    Raises:
        ContractViolation: if the mean is above the limit, or no number.
    """
    mean = figures.get("agreement/gap_mean")
    if mean is None or mean <= limit:
        return
    raise ContractViolation(
        f"policy_agreement: mean log-prob gap {mean:.3e} between trainer and engine at equal "
        f"weights is above {limit:.1e} (p99 {figures['agreement/gap_p99']:.3e}, "
        f"max {figures['agreement/gap_max']:.3e}, {figures['agreement/tokens']:.0f} tokens, "
        f"update {update})",
        update=update,
        limit=limit,
        **figures,
    )


def refresh_scores(
    flat: FlatCollection,
    train_R: NDArray[np.float32],
    outside_R: NDArray[np.bool_],
    measured_R: NDArray[np.bool_],
) -> dict[str, float]:
    """What a refresh did to the responses it caught: older tokens and newer ones apart.

    Args:
        flat: the collection.
        train_R: trainer's log-probs before its first step on the collection.
        outside_R: tokens whose TIS weight lies outside the bounds.
        measured_R: where ``train_R`` holds a log-prob.

    Returns:
        ``refresh/mixed_responses``; with any, for ``prefix`` (tokens kept from before the last
        refresh) and ``latest`` (tokens of the last forward): ``refresh/<part>_gap_mean``,
        ``_clip_share`` and ``_tokens``. Both hold true policy age besides numerics.
    """
    result = {"refresh/mixed_responses": float(flat.is_mixed_S.sum())}
    mixed_R = flat.is_mixed_S[flat.seq_R] & flat.active_R & measured_R
    for part, where_R in (("prefix", ~flat.latest_R), ("latest", flat.latest_R)):
        chosen_R = mixed_R & where_R
        if chosen_R.any():
            gap = np.abs(train_R[chosen_R].astype(np.float64) - flat.behaviour_R[chosen_R])
            result[f"refresh/{part}_gap_mean"] = float(gap.mean())
            result[f"refresh/{part}_clip_share"] = float(outside_R[chosen_R].mean())
            result[f"refresh/{part}_tokens"] = float(gap.size)
    return result


def require_no_policy_gradient(norm: float | None, *, update: int) -> None:
    """In a batch of equal groups the policy term must have no gradient at all.

    Args:
        norm: measured policy gradient norm; None where it was not measured.
        update: the update being made.

    Raises:
        ContractViolation: if it was measured and is not 0.
    """
    if norm is not None and norm != 0:
        raise ContractViolation(
            f"optimizer: all groups of update {update} have equal rewards, yet the policy gradient "
            f"norm is {norm:.3e}",
            update=update,
            policy_grad_norm=norm,
        )


def require_finite_steps(skipped: int, *, limit: int, update: int) -> None:
    """Skipped steps may not exceed ``limit`` over the run.

    Raises:
        ContractViolation: past the limit.
    """
    if skipped > limit:
        raise ContractViolation(
            f"optimizer: {skipped} step(s) skipped for a gradient that is not finite, "
            f"{limit} allowed (update {update})",
            update=update,
            skipped_steps=skipped,
            limit=limit,
        )
