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


def served_scores(
    sequences: tuple[Sequence, ...], top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A served teacher's log-probs [R, max(K, 1)] and ids [R, K] of all response tokens.

    Args:
        sequences: one after another.
        top_k: K; 0: of the response's own tokens.

    Raises:
        ContractViolation: if a sequence came without, or with those of another K: it was never
            scored, or for another run.
    """
    width = max(top_k, 1)
    for position, s in enumerate(sequences):
        found = len(s.teacher_logprobs), len(s.teacher_ids)
        if found != (len(s.logprobs) * width, len(s.logprobs) * top_k):
            raise ContractViolation(
                f"sequence {position} of {len(s.logprobs)} tokens has {found[0]} log-probs and "
                f"{found[1]} ids of the teacher, for top_k {top_k}",
                sequence=position,
            )
    logprob_RK = np.concatenate([s.teacher_logprobs for s in sequences]).astype(np.float32)
    id_RK = np.concatenate([s.teacher_ids for s in sequences]).astype(np.int64)
    rows = len(logprob_RK) // width
    return logprob_RK.reshape(rows, width), id_RK.reshape(rows, top_k)


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
