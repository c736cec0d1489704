"""The order in which prompts are asked: one permutation a pass, the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from runtime.data.samples import PromptId

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class PromptOrder:
    """Positions 0 .. ``total`` - 1 over all passes, and the prompt at each.

    Holds one pass at a time (4 bytes a row), so a walk costs O(1) a prompt plus one sort a pass.
    Not thread-safe; the ledger calls it under its lock.
    """

    def __init__(
        self, num_prompts: int, *, epochs: int = 1, seed: int = 0, shuffle: bool = True
    ) -> None:
        if num_prompts < 1 or epochs < 1:
            raise ValueError(f"an order needs prompts and passes: {num_prompts} x {epochs}")
        self.num_prompts = num_prompts
        self.epochs = epochs
        self.seed = seed
        self.shuffle = shuffle
        self._pass = -1
        self._rows: NDArray[np.int32] = np.empty(0, np.int32)

    @property
    def total(self) -> int:
        """Prompts of all passes together."""
        return self.num_prompts * self.epochs

    def at(self, position: int) -> PromptId:
        """The prompt at a position counted over all passes.

        Raises:
            IndexError: if the position lies outside [0, total).
        """
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} outside [0, {self.total})")
        pass_, offset = divmod(position, self.num_prompts)
        if not self.shuffle:
            return PromptId(pass_, offset)
        if pass_ != self._pass:
            self._rows, self._pass = self.rows(pass_), pass_
        return PromptId(pass_, int(self._rows[offset]))

    def rows(self, pass_: int) -> NDArray[np.int32]:
        """int32 [num_prompts]: the rows of one pass in the order they are asked."""
        if not self.shuffle:
            return np.arange(self.num_prompts, dtype=np.int32)
        return permutation(self.num_prompts, seed=self.seed, pass_=pass_)


def permutation(num_rows: int, *, seed: int, pass_: int) -> NDArray[np.int32]:
    """Rows sorted by a 64-bit hash of (seed, pass, row).

    A hash of our own instead of a generator's ``permutation``: numpy may change the latter between
    versions, and a run resumed under another numpy must see the same order.

    Source of the hash: Steele, Lea, Flood 2014, SplitMix64 (as in Vigna's public-domain C).
    """
    key = hashlib.sha256(f"milepost.order.v1/{seed}/{pass_}".encode()).digest()
    start = np.uint64(int.from_bytes(key[:8], "little"))
    z = start + np.arange(1, num_rows + 1, dtype=np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    return np.argsort(z, kind="stable").astype(np.int32)
