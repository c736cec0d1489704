"""KV of all running requests in two tensors, one slot each, and the transformers view of them.

Suffixes: S slots, B rows in use (slots 0..B-1), K KV heads, L positions, D head size, N layers.

Slots are kept dense: when a request leaves, the last one moves into its slot. A decode step then
reads a plain view [:B, :, :length], where a gather would copy every request's history every step.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

ROUND_TO = 16
"""Attended lengths are rounded up to this: softmax over 12 columns is slower than over 16."""


def rounded(length: int) -> int:
    """``length`` rounded up to a whole number of ROUND_TO."""
    return -(-length // ROUND_TO) * ROUND_TO


class SlotCache:
    """Keys and values [N, S, K, L, D]; grows by copying, never shrinks by itself."""

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._dtype = dtype
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    @property
    def num_slots(self) -> int:
        """Slots allocated now."""
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        """Positions each slot can hold now."""
        return self.keys.shape[3]

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for ``num_slots`` slots of ``length`` positions, keeping what is there."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        slots, positions = max(num_slots, self.num_slots), max(rounded(length), self.length)
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = self._zeros(slots, positions)
            new[:, : old.shape[1], :, : old.shape[3]] = old
            setattr(self, name, new)

    def fill(self, slots: NDArray[np.int64], rows: NDArray[np.int64], prefilled: Prefilled) -> None:
        """Copy prefilled rows into slots (a row may go to several); the rest of a slot is stale."""
        at, row = torch.from_numpy(slots), torch.from_numpy(rows)
        for layer, (key, value) in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
            length = key.shape[2]
            self.keys[layer, at, :, :length] = key[row]
            self.values[layer, at, :, :length] = value[row]

    def move(self, from_: NDArray[np.int64], to: NDArray[np.int64], length: int) -> None:
        """Copy the first ``length`` positions of slots ``from_`` to slots ``to`` (disjoint)."""
        source, target = torch.from_numpy(from_), torch.from_numpy(to)
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def _zeros(self, slots: int, positions: int) -> Tensor:
        # Zeros, not empty: masked positions are multiplied by a probability of 0, and 0 x NaN is
        # NaN.
        layers, heads, dim = self._shape
        return torch.zeros(layers, slots, heads, positions, dim, dtype=self._dtype)


class Prefilled:
    """KV of freshly read prompts: per layer [P, K, T, D], right-padded rows."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys
        self.values = values

    def row(self, index: int, length: int) -> Prefilled:
        """One prompt's KV without padding, in memory of its own."""
        at = slice(index, index + 1)
        return Prefilled(
            [k[at, :, :length].clone() for k in self.keys],
            [v[at, :, :length].clone() for v in self.values],
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class _Layer(CacheLayerMixin):
    """What both layers share: asked only by transformers' mask building, and we pass our masks."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    # Older names of the same question (transformers < 5.20).
    get_max_cache_shape = get_max_length


class _PrefillLayer(_Layer):
    """Hands keys and values through and keeps them."""

    read: tuple[Tensor, Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.read = key_states, value_states
        return self.read


class _DecodeLayer(_Layer):
    """Writes one position per slot and returns the dense view of all slots in use."""

    def __init__(self, step: DecodeCache, layer: int) -> None:
        super().__init__()
        self._step = step
        self._layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._step.write(self._layer, key_states[:, :, 0], value_states[:, :, 0])


class PrefillCache(Cache):
    """A transformers cache for one forward over whole prompts."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_PrefillLayer() for _ in range(num_layers)])

    def prefilled(self) -> Prefilled:
        """What the forward left behind."""
        layers = cast(list[_PrefillLayer], self.layers)
        return Prefilled([x.read[0] for x in layers], [x.read[1] for x in layers])


class DecodeCache(Cache):
    """A transformers cache for decode steps: one new position in each of the slots in use."""

    def __init__(self, slots: SlotCache, num_layers: int) -> None:
        super().__init__(layers=[_DecodeLayer(self, i) for i in range(num_layers)])
        self._slots = slots
        self._row_B = torch.empty(0, dtype=torch.int64)
        self._position_B = self._row_B
        self._length = 0

    def aim(self, row_B: Tensor, position_B: Tensor, length: int) -> None:
        """Set where the next step writes, and how many positions it attends to."""
        self._row_B, self._position_B, self._length = row_B, position_B, length

    def write(self, layer: int, key_BKD: Tensor, value_BKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new position of every slot; returns the views [B, K, length, D]."""
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        keys[self._row_B, :, self._position_B] = key_BKD
        values[self._row_B, :, self._position_B] = value_BKD
        used = len(self._row_B)
        return keys[:used, :, : self._length], values[:used, :, : self._length]
