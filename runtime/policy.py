"""Policy ids: which weights, made by which owner.

After a rewind update 55 comes again with other weights, so a bare update number names nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_TEXT = re.compile(r"e(\d+)\.u(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class PolicyId:
    """(epoch, update), written ``e3.u55`` on every wire and file. Ordered by epoch, then update."""

    epoch: int
    update: int

    def __str__(self) -> str:
        return f"e{self.epoch}.u{self.update}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``e3.u55``.

        Raises:
            ValueError: if the text is anything else.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a policy id: {text!r} (expected e<epoch>.u<update>)")
        return cls(int(match[1]), int(match[2]))
