"""One collection as flat arrays over all its response tokens: the form figures are taken from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ContractViolation
from runtime.trainer.protocol import Sequence

# Legend: S sequences, R response tokens of all of them, one sequence after another.


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCollection:
    """Per-token arrays; ``offset_S[s]:offset_S[s + 1]`` are the tokens of sequence s."""

    offset_S: NDArray[np.int64]
    """[S + 1]"""
    length_S: NDArray[np.int64]
    seq_R: NDArray[np.int64]
    behaviour_R: NDArray[np.float32]
    active_R: NDArray[np.bool_]
    advantage_S: NDArray[np.float32]
    group_S: NDArray[np.int64]
    is_equal_S: NDArray[np.bool_]
    is_mixed_S: NDArray[np.bool_]
    """More than one policy generated tokens."""
    latest_R: NDArray[np.bool_]
    """The token lies in the last policy span of its response."""
    prefill_S: NDArray[np.int64]
    span_low_S: NDArray[np.int64]
    span_high_S: NDArray[np.int64]

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.length_S)

    @property
    def num_tokens(self) -> int:
        """R."""
        return len(self.seq_R)

    def wholly_of(self, update: int) -> NDArray[np.bool_]:
        """[S] whose prefill and tokens are all of the policy of ``update``."""
        return (
            (self.prefill_S == update) & (self.span_low_S == update) & (self.span_high_S == update)
        )

    def active_per_sequence(self) -> NDArray[np.int64]:
        """[S] number of active tokens."""
        return np.bincount(self.seq_R[self.active_R], minlength=self.num_sequences)

    def num_groups(self) -> tuple[int, int]:
        """(mixed, equal) groups."""
        equal = len(np.unique(self.group_S[self.is_equal_S]))
        return len(np.unique(self.group_S)) - equal, equal


def flatten(sequences: tuple[Sequence, ...]) -> FlatCollection:
    """Lay a collection out flat.

    Raises:
        ContractViolation: if it is empty, or a sequence has no response, no prompt, or arrays whose
            lengths disagree: then token and log-prob could be paired wrongly.
    """
    if not sequences:
        raise ContractViolation("a collection without sequences reached the trainer")
    for position, s in enumerate(sequences):
        _check(position, s)
    length_S = np.array([len(s.logprobs) for s in sequences], dtype=np.int64)
    offset_S = np.concatenate([np.zeros(1, np.int64), np.cumsum(length_S)])
    seq_R = np.repeat(np.arange(len(sequences)), length_S)
    last_start_S = np.array(
        [s.span_ends[-2] if len(s.span_ends) > 1 else 0 for s in sequences], dtype=np.int64
    )
    column_R = np.arange(len(seq_R)) - offset_S[seq_R]
    low_S = np.array([s.span_updates.min() for s in sequences], dtype=np.int64)
    high_S = np.array([s.span_updates.max() for s in sequences], dtype=np.int64)
    return FlatCollection(
        offset_S=offset_S,
        length_S=length_S,
        seq_R=seq_R,
        behaviour_R=np.concatenate([s.logprobs for s in sequences]).astype(np.float32),
        active_R=np.concatenate([s.mask for s in sequences]) > 0,
        advantage_S=np.array([s.advantage for s in sequences], dtype=np.float32),
        group_S=np.array([s.group for s in sequences], dtype=np.int64),
        is_equal_S=np.array([s.is_equal for s in sequences], dtype=np.bool_),
        is_mixed_S=low_S != high_S,
        latest_R=column_R >= last_start_S[seq_R],
        prefill_S=np.array([s.prefill_update for s in sequences], dtype=np.int64),
        span_low_S=low_S,
        span_high_S=high_S,
    )


def _check(position: int, s: Sequence) -> None:
    response = len(s.tokens) - s.prompt_len
    lengths = (response, len(s.logprobs), len(s.mask))
    spans_end = int(s.span_ends[-1]) if len(s.span_ends) else 0
    if s.prompt_len < 1 or response < 1 or len({*lengths, spans_end}) != 1:
        raise ContractViolation(
            f"sequence {position} does not fit together: prompt {s.prompt_len}, response, "
            f"log-probs and mask {lengths}, spans end at {spans_end}",
            sequence=position,
        )
    if len(s.span_ends) != len(s.span_updates):
        raise ContractViolation(
            f"sequence {position}: {len(s.span_ends)} span ends, {len(s.span_updates)} policies",
            sequence=position,
        )
    if s.is_equal and s.advantage != 0:
        raise ContractViolation(
            f"sequence {position} of a group with equal rewards has advantage {s.advantage}",
            sequence=position,
        )
