"""Which experts read which token: what a MoE engine reports about a response, kept compactly.

One row for each token the model read (the last sampled one is never read), by layer, with the
chosen experts in the router's order.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from runtime.errors import ContractViolation

if TYPE_CHECKING:  # samples are read where numpy never is: by the guard and by `milepost status`
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """What a model's router chooses from."""

    layers: int
    """All layers of the model; of a dense one every entry is 0."""
    top_k: int
    experts: int


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Choices for the first ``num_rows`` tokens of prompt and response."""

    data: bytes
    """uint8, or little-endian uint16 with more than 256 experts: [num_rows, layers, top_k]."""
    shape: RouterShape

    @property
    def num_rows(self) -> int:
        """Tokens that were read."""
        row = self.shape.layers * self.shape.top_k * _width(self.shape)
        return len(self.data) // row

    def rows(self) -> NDArray[np.integer]:
        """Choices as an array [num_rows, layers, top_k]; a view."""
        import numpy as np

        flat = np.frombuffer(self.data, _dtype(self.shape))
        return flat.reshape(-1, self.shape.layers, self.shape.top_k)

    def followed_by(self, tail: RoutedExperts) -> RoutedExperts:
        """These rows, then what of ``tail`` comes after them.

        ``tail`` is of a request that began with the tokens of this one and read them again: whose
        choices count for a token is decided by who read it when the next one was sampled.
        """
        if tail.shape != self.shape or tail.num_rows < self.num_rows:
            raise ContractViolation(
                f"{tail.num_rows} rows of choices cannot follow {self.num_rows} they begin with"
            )
        return RoutedExperts(self.data + tail.data[len(self.data) :], self.shape)

    @classmethod
    def decode(cls, text: object, *, num_tokens: int, shape: RouterShape) -> Self:
        """Read an engine's base64 of int32.

        Args:
            text: as it stands in the answer.
            num_tokens: of prompt and response together.
            shape: of the model that was served.

        Raises:
            ContractViolation: if it is missing or no such text, has another size than
                [num_tokens - 1, layers, top_k], names an expert that does not exist, or one twice
                for a token.
        """
        import numpy as np

        if not isinstance(text, str):
            raise ContractViolation("the engine told no choices of experts, though it was asked")
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ContractViolation("choices of experts are no base64") from error
        expected = (num_tokens - 1) * shape.layers * shape.top_k
        if len(raw) != 4 * expected:
            raise ContractViolation(
                f"{len(raw)} bytes of expert choices for {num_tokens - 1} tokens, {shape.layers} "
                f"layers and top {shape.top_k}: expected {4 * expected}"
            )
        rows = np.frombuffer(raw, "<i4").reshape(-1, shape.layers, shape.top_k)
        if rows.size and not (rows.min() >= 0 and rows.max() < shape.experts):
            raise ContractViolation(
                f"an expert outside [0, {shape.experts}): {rows.min()} to {rows.max()}"
            )
        ordered = np.sort(rows, axis=2)
        is_twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
        # A layer without a router is all zeros.
        if (is_twice & rows.any(axis=2)).any():
            raise ContractViolation("an expert was chosen twice for one token of one layer")
        return cls(rows.astype(_dtype(shape)).tobytes(), shape)


def _width(shape: RouterShape) -> int:
    """Bytes of one choice."""
    return 1 if shape.experts <= 256 else 2


def _dtype(shape: RouterShape) -> str:
    return f"<u{_width(shape)}"
