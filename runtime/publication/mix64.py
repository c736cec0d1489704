"""A digest of a tensor that a GPU makes where the tensor lies: 64 bits, at the speed of memory.

A tensor is read as 32-bit words, in tiles. Each word is mixed with its place, by MurmurHash3's
finaliser (Appleby, public domain); a tile is the sum of its words, mixed once more, in two halves
with two seeds; the digest is the sum of all tiles, mixed by SplitMix64's finaliser (Steele, Lea and
Flood 2014). SGLang names cached images by the same figure: constants and tile size are its.

It finds what goes wrong by accident. Somebody who wants two tensors of one digest can make them.
"""

# Kernels have no types that a checker could follow.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import torch

TILE = 8192
_MASK = 0xFFFFFFFF
_MASK64 = 2**64 - 1
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Factor of a word's place, and by how many bits the place is turned."""
_C1, _C2 = 0x85EBCA6B, 0xC2B2AE35


class Tiles:
    """Digests of a stream of tensors; the device is waited for once, at the end.

    On a GPU one kernel takes many tensors: a launch each would take longer than the reading.

    Args:
        ahead_bytes: how much may wait for its kernel.
    """

    def __init__(self, ahead_bytes: int = 512 * 1024**2) -> None:
        self._ahead_bytes = ahead_bytes
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._tiles: list[torch.Tensor] = []
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; its elements must not change before ``result``."""
        self.add_words(name, words_of(tensor))

    def add_words(self, name: str, words: torch.Tensor) -> None:
        """The same of what ``words_of`` made of it."""
        self._names.append(name)
        self._lengths.append(-(-words.numel() // TILE))
        if words.is_cuda:
            self._waiting.append(words)
            self._waiting_bytes += words.nbytes
            if self._waiting_bytes >= self._ahead_bytes:
                self._launch()
        else:
            self._tiles.append(_tiles_of(words))

    def result(self) -> dict[str, str]:
        """All digests, in the order of the tensors."""
        self._launch()
        if not self._names:
            return {}
        # Sums of all at once, by differences of running sums: a kernel each would take longer
        # than the tiles. Sums wrap, and only their lowest 64 bits count.
        running = torch.cat([self._tiles[0].new_zeros(1), *self._tiles]).cumsum(0).cpu()
        ends = torch.tensor(self._lengths).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        totals: list[int] = (running[ends] - running[starts]).tolist()
        return {name: digest(t) for name, t in zip(self._names, totals, strict=True)}

    def _launch(self) -> None:
        if self._waiting:
            from runtime.publication.mix64_kernel import tiles_on_gpu

            self._tiles.append(tiles_on_gpu(self._waiting, tile=TILE, seeds=_SEEDS))
            self._waiting, self._waiting_bytes = [], 0


def mix64(tensor: torch.Tensor) -> str:
    """Digest of one tensor; an empty one has digest 0."""
    tiles = Tiles()
    tiles.add("", tensor)
    return tiles.result()[""]


def _tiles_of(words: torch.Tensor) -> torch.Tensor:
    """The tiles of one tensor, whose sum is finished by ``digest``; int64, by plain operations."""
    place = torch.arange(words.numel(), dtype=torch.int64)
    value = words.to(torch.int64) & _MASK
    halves = [_half(value, place, which) for which in (0, 1)]
    return (halves[0] << 32) | halves[1]


def digest(total: int) -> str:
    """The digest of a tensor from the sum of its tiles (any integer; 64 bits count)."""
    x = total & _MASK64
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _MASK64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return f"{x:016x}"


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as int32 words: a view where it can be one, else a copy."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -flat.numel() % 4:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(torch.int32)


def _half(value: torch.Tensor, place: torch.Tensor, which: int) -> torch.Tensor:
    factor, turn = _PLACES[which]
    turned = ((place << turn) | (place >> (32 - turn))) & _MASK
    mixed = _mixed(value ^ (((place * factor + _SEEDS[which]) & _MASK) ^ turned))
    missing = -mixed.numel() % TILE
    if missing:
        mixed = torch.cat([mixed, mixed.new_zeros(missing)])
    sums = mixed.view(-1, TILE).sum(1) & _MASK
    return _mixed(sums ^ ((value.numel() * 4) & _MASK))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    # int64 products wrap, and only their lowest 32 bits are kept.
    x = x ^ (x >> 16)
    x = (x * _C1) & _MASK
    x = x ^ (x >> 13)
    x = (x * _C2) & _MASK
    return x ^ (x >> 16)
