"""What an evaluation reports: mean, pass@k, interval, length, cap share.

The prompt is the unit: every figure is a mean over prompts, and the interval resamples prompts,
since samples of one prompt are no independent evidence. A prompt without an answer of the verifier
is missing, never a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SOLVED = 1.0
"""Reward from which a sample counts as right in pass@k."""
_MAX_DRAWS = 1 << 20
"""Resampled indices held at once: 8 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One prompt with all its samples judged; equally long, at least one."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Tokens per response."""
    capped: tuple[bool, ...]
    """Cut off at the longest allowed response."""

    def __post_init__(self) -> None:
        if not self.rewards or not len(self.rewards) == len(self.lengths) == len(self.capped):
            raise ValueError(
                f"{len(self.rewards)} rewards, {len(self.lengths)} lengths, "
                f"{len(self.capped)} cap marks: one of each per sample, at least one sample"
            )


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its bootstrap interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of ``k`` samples is right, ``c`` of ``n`` being right; unbiased.

    1 - C(n - c, k) / C(n, k), as a product, so that large n overflow nothing.

    Args:
        n: samples drawn.
        c: right ones among them.
        k: samples one would be allowed, 1 <= k <= n.

    Raises:
        ValueError: if not 0 <= c <= n or not 1 <= k <= n.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}: needs 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    none_right = 1.0
    for i in range(n - c + 1, n + 1):
        none_right *= 1.0 - k / i
    return 1.0 - none_right


def bootstrap_interval(
    values: Sequence[float], *, seed: int, resamples: int = 1000, confidence: float = 0.95
) -> Interval:
    """Mean of ``values`` with the percentile bootstrap interval of it. Same seed, same interval.

    Args:
        values: one per prompt, at least one, finite.
        seed: of the resampling.
        resamples: how many times.
        confidence: share of resampled means inside.

    Raises:
        ValueError: if there are no values or confidence is outside (0, 1).

    Source: Efron 1979, percentile method.
    """
    if not values or not 0 < confidence < 1:
        raise ValueError(f"{len(values)} values, confidence {confidence}: nothing to resample")
    value_P: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means: list[NDArray[np.float64]] = []
    left, step = resamples, max(1, _MAX_DRAWS // len(values))
    while left > 0:
        index_RP = rng.integers(len(values), size=(min(step, left), len(values)))
        means.append(value_P[index_RP].mean(axis=1))
        left -= step
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(float(value_P.mean()), float(low), float(high))


def summarise(
    items: Sequence[Judged], *, pass_at: int, seed: int, num_missing: int = 0
) -> dict[str, float]:
    """All figures of one evaluation, by the names they have under ``evaluation/<set>/``.

    Args:
        items: the judged prompts, in any order of the same multiset: the order of the data file
            gives the same interval every time.
        pass_at: largest k reported; also 1 is, when samples allow.
        seed: of the bootstrap.
        num_missing: prompts the verifier gave no answer for.

    Returns:
        mean, mean_low, mean_high; pass_at_<k> with _low and _high for k of 1 and ``pass_at``;
        length_mean, cap_share, num_prompts, num_samples, num_missing. Without items only the
        counts.

    Raises:
        ValueError: if a prompt has fewer than ``pass_at`` samples.
    """
    counts = {
        "num_prompts": float(len(items)),
        "num_samples": float(sum(len(item.rewards) for item in items)),
        "num_missing": float(num_missing),
    }
    if not items:
        return counts
    figures: dict[str, float] = {}
    mean = bootstrap_interval([_mean(item.rewards) for item in items], seed=seed)
    figures |= _named("mean", mean)
    for k in sorted({1, pass_at}):
        chances = [
            pass_at_k(len(item.rewards), sum(r >= SOLVED for r in item.rewards), k)
            for item in items
        ]
        figures |= _named(f"pass_at_{k}", bootstrap_interval(chances, seed=seed))
    figures["length_mean"] = _mean([_mean(item.lengths) for item in items])
    figures["cap_share"] = _mean([_mean(item.capped) for item in items])
    return figures | counts


def _named(name: str, found: Interval) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
