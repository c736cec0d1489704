"""Prompts read not long ago: their KV and the logits after them.

Whole prompts only, for siblings of a group that come as separate requests. Entries belong to one
set of weights: ``clear`` runs on every weight change, so old KV is never served as new, with or
without a salt and whether or not the client asks for a flush.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from runtime.engines.embedded.cache import Prefilled

PromptKey = tuple[str | None, tuple[int, ...]]
"""(salt, token ids)"""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """One prompt's KV without padding, and float32 logits [V] after its last token."""

    kv: Prefilled
    logits_V: Tensor


class PrefixStore:
    """Least recently used prompts within a budget of bytes. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._entries: OrderedDict[PromptKey, ReadPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: PromptKey) -> ReadPrompt | None:
        """The entry, which becomes the most recently used one."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: PromptKey, entry: ReadPrompt) -> None:
        """Keep it, and forget the oldest ones past the budget."""
        if key in self._entries:
            return
        self._entries[key] = entry
        self._bytes += _bytes(entry)
        while self._bytes > self._budget_bytes and self._entries:
            _, old = self._entries.popitem(last=False)
            self._bytes -= _bytes(old)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._bytes = 0


def _bytes(entry: ReadPrompt) -> int:
    return entry.kv.num_bytes + entry.logits_V.numel() * entry.logits_V.element_size()
