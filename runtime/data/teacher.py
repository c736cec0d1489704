"""What a teacher says about one response: carried with the sample from its server to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ContractViolation

# Legend: R tokens of the response, K the teacher's likeliest tokens at each.


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Natural log-probs at temperature 1, at each token of one response, in order."""

    top_k: int
    """0: of the sampled tokens; K: of the teacher's K likeliest tokens."""
    logprobs: bytes
    """float32 [R], or [R, K]."""
    ids: bytes
    """int32 [R, K]; empty with ``top_k`` 0."""

    @classmethod
    def of_sampled(cls, logprobs: Sequence[float]) -> Self:
        """Of the response's own tokens."""
        return cls(0, np.asarray(logprobs, np.float32).tobytes(), b"")

    @classmethod
    def of_likeliest(
        cls, logprobs: Sequence[Sequence[float]], ids: Sequence[Sequence[int]]
    ) -> Self:
        """Of the likeliest tokens at each place; R >= 1."""
        values = np.asarray(logprobs, np.float32)
        return cls(values.shape[1], values.tobytes(), np.asarray(ids, np.int32).tobytes())

    def arrays(self, num_tokens: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Flat log-probs and ids, row by row, for a response of so many tokens.

        Raises:
            ContractViolation: if they are those of another number of tokens.
        """
        logprobs, ids = np.frombuffer(self.logprobs, np.float32), np.frombuffer(self.ids, np.int32)
        expected = num_tokens * max(self.top_k, 1), num_tokens * self.top_k
        if (len(logprobs), len(ids)) != expected:
            raise ContractViolation(
                f"a teacher's {len(logprobs)} log-probs and {len(ids)} ids (top_k {self.top_k}) do "
                f"not belong to a response of {num_tokens} tokens"
            )
        return logprobs, ids
