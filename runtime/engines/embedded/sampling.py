"""Drawing the next token of every row at once, and the log-prob it was drawn with.

Suffixes: B rows (one per running request), V vocabulary.

The draw inverts the cumulative distribution at one uniform number per row. That number depends only
on (seed of the request, index of the token in the response), so a request gives the same tokens
whatever shares its batch. torch.multinomial draws V exponentials per row instead: 1.4 ms against
0.1 ms for [256, 261] on one core, as much as a third of a decode step of the laptop's model.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-6
"""A temperature below this is greedy, with log-probs at temperature 1 (as SGLang has it)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(slots=True, kw_only=True)
class SamplingRows:
    """Sampling settings of every slot; one row per slot, kept dense by the decoder."""

    temperature: NDArray[np.float32]
    """Never below GREEDY_BELOW; 1 for greedy rows."""
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """Vocabulary size where it is off."""
    min_p: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    filtered: NDArray[np.bool_]
    """Rows where top-p, top-k or min-p is on: only these pay for a sort."""
    seed: NDArray[np.uint64]

    @classmethod
    def empty(cls, num_slots: int) -> SamplingRows:
        """Rows for ``num_slots`` slots with everything off."""
        return cls(
            temperature=np.ones(num_slots, np.float32),
            top_p=np.ones(num_slots, np.float32),
            top_k=np.zeros(num_slots, np.int64),
            min_p=np.zeros(num_slots, np.float32),
            greedy=np.zeros(num_slots, np.bool_),
            filtered=np.zeros(num_slots, np.bool_),
            seed=np.zeros(num_slots, np.uint64),
        )

    def arrays(self) -> list[NDArray[np.generic]]:
        """All columns, for moving rows between slots."""
        return [
            self.temperature, self.top_p, self.top_k, self.min_p, self.greedy, self.filtered,
            self.seed,
        ]  # fmt: skip


def uniforms(seed_B: NDArray[np.uint64], index_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number in [0, 1) per row, a function of (seed, index) alone.

    Args:
        seed_B: uint64 [B] seed of each request.
        index_B: int64 [B] index of the token to draw within its response.

    Returns:
        float32 [B], multiples of 2**-24.

    Source: Steele, Lea, Flood 2014, SplitMix64: output ``index`` of the stream started at ``seed``.
    """
    # Arrays of uint64 wrap silently, as meant here.
    z = seed_B + (index_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def sibling_seed(seed: int, sibling: int) -> int:
    """The seed of the ``sibling``-th of n samples; sibling 0 keeps the seed itself."""
    if sibling == 0:
        return seed & (2**64 - 1)
    mixed = (seed * 0xD1342543DE82EF95 + sibling * 0xAF251AF3B0F025B5) & (2**64 - 1)
    return mixed ^ (mixed >> 29)


def sample(
    logits_BV: Tensor, rows: SamplingRows, at: slice | NDArray[np.int64], u_B: NDArray[np.float32]
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_BV: float32 [B, V]; not kept, not changed.
        rows: settings by slot.
        at: the B slots these logits belong to.
        u_B: float32 [B] in [0, 1).

    Returns:
        int64 [B] tokens, and float32 [B] natural log-probs of them under softmax(logits /
        temperature), before top-p, top-k and min-p cut anything off (SGLang's convention).
    """
    temperature = rows.temperature[at]
    if (temperature != 1.0).any():
        logits_BV = logits_BV / torch.from_numpy(temperature).unsqueeze(1)
    logprob_BV = torch.log_softmax(logits_BV, dim=-1)
    greedy = rows.greedy[at]
    if greedy.all():
        token_B = logprob_BV.argmax(-1)
    else:
        token_B = _draw(logprob_BV, rows, at, torch.from_numpy(u_B))
        if greedy.any():
            token_B = torch.where(torch.from_numpy(greedy), logprob_BV.argmax(-1), token_B)
    return token_B, logprob_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)


def _draw(
    logprob_BV: Tensor, rows: SamplingRows, at: slice | NDArray[np.int64], u_B: Tensor
) -> Tensor:
    prob_BV = logprob_BV.exp()
    filtered = np.flatnonzero(rows.filtered[at])
    if filtered.size:
        which = torch.from_numpy(filtered)
        prob_BV[which] = _cut(
            prob_BV[which],
            torch.from_numpy(rows.top_p[at][filtered]).unsqueeze(1),
            torch.from_numpy(rows.top_k[at][filtered]).unsqueeze(1),
            torch.from_numpy(rows.min_p[at][filtered]).unsqueeze(1),
        )
    cdf_BV = prob_BV.cumsum(-1)
    total_B1 = cdf_BV[:, -1:]
    # Strictly below the total even after rounding: the first entry above it then has a probability
    # above 0, so a token that was cut off can never be drawn.
    x_B1 = torch.minimum(
        u_B.unsqueeze(1) * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    # The clamp only matters for logits that are not finite: their log-prob is NaN, and the client
    # refuses the response; an index past the vocabulary would end the server.
    last = cdf_BV.shape[1] - 1
    return torch.searchsorted(cdf_BV, x_B1, right=True).squeeze(1).clamp_(max=last)


def _cut(prob_BV: Tensor, top_p_B1: Tensor, top_k_B1: Tensor, min_p_B1: Tensor) -> Tensor:
    """Zero what top-p, top-k and min-p leave out. The likeliest token always stays."""
    sorted_BV, order_BV = prob_BV.sort(dim=-1, descending=True)
    rank_V = torch.arange(prob_BV.shape[1])
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    keep_BV = (
        (before_BV <= top_p_B1) & (rank_V < top_k_B1) & (sorted_BV >= min_p_B1 * sorted_BV[:, :1])
    )
    keep_BV[:, 0] = True
    return torch.zeros_like(prob_BV).scatter_(1, order_BV, sorted_BV * keep_BV)
