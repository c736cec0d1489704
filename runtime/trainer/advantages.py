"""From the rewards of a group to the advantages of its samples. NumPy only: no torch needed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Legend: G samples of one group.

EPS = 1e-6


def group_advantages(
    reward_G: ArrayLike,
    *,
    normalize_std: bool = True,
    rollouts: Sequence[Hashable] | None = None,
    eps: float = EPS,
) -> NDArray[np.float32]:
    """Centre, and unless told otherwise scale, the rewards of one group.

    Args:
        reward_G: [G] finite rewards of one prompt's samples, G >= 1.
        normalize_std: divide by the unbiased standard deviation plus ``eps``; False is Dr. GRPO.
        rollouts: identity of the rollout of each sample; None: every sample is its own. Samples of
            one agentic rollout carry one and the same reward, which then counts once in mean and
            standard deviation.
        eps: in reward units.

    Returns:
        float32 [G]. Exactly 0 everywhere when the largest reward equals the smallest: decided by
        max = min, since rounding can make the standard deviation of equal rewards tiny and not 0.
        A single rollout has itself as mean and so gets 0.

    Raises:
        ValueError: if the group is empty, a reward is not finite, or samples of one rollout differ.

    Source: Shao et al. 2024 (DeepSeekMath), outcome supervision; Liu et al. 2025 (Dr. GRPO) for the
    form without the standard deviation.
    """
    reward_G = np.asarray(reward_G, dtype=np.float64)
    if reward_G.ndim != 1 or reward_G.size == 0 or not np.isfinite(reward_G).all():
        raise ValueError(f"a group needs one or more finite rewards, not {reward_G!r}")
    counted = reward_G if rollouts is None else _one_per_rollout(reward_G, rollouts)
    if counted.max() == counted.min():
        return np.zeros(reward_G.shape, np.float32)
    advantage_G = reward_G - counted.mean()
    if normalize_std:
        advantage_G = advantage_G / (counted.std(ddof=1) + eps)
    return advantage_G.astype(np.float32)


def reinforce_advantages(reward_G: ArrayLike, *, baseline: float = 0.0) -> NDArray[np.float32]:
    """Rewards less a fixed baseline, for losses that use no group mean; never scaled.

    Source: Williams 1992 (REINFORCE).
    """
    return (np.asarray(reward_G, dtype=np.float64) - baseline).astype(np.float32)


def is_equal_group(reward_G: ArrayLike) -> bool:
    """Largest equals smallest: the group carries no policy gradient."""
    reward_G = np.asarray(reward_G, dtype=np.float64)
    return bool(reward_G.max() == reward_G.min())


def _one_per_rollout(
    reward_G: NDArray[np.float64], rollouts: Sequence[Hashable]
) -> NDArray[np.float64]:
    seen: dict[Hashable, float] = {}
    for key, reward in zip(rollouts, reward_G.tolist(), strict=True):
        if seen.setdefault(key, reward) != reward:
            raise ValueError(f"rollout {key!r} has two rewards: {seen[key]} and {reward}")
    return np.array(list(seen.values()), dtype=np.float64)
