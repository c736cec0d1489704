"""The packed row of one micro-batch: where each token lies and who may look at whom.

Legend: T tokens of the row; S sequences; L longest sequence fed; R response tokens.

Siblings share their prompt: its tokens lie in the row once, followed by each sibling's response::

    prompt a | response a1 | response a2 | prompt b | response b1 ...

The last token of a response is predicted and never fed, so it is not in the row at all.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.trainer.packing import Bin
from runtime.trainer.protocol import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch without padding; all tensors int64."""

    token_T: Tensor
    position_T: Tensor
    row_SL: Tensor
    """Token of the row at each place of each sequence, prompt first; unused places point to 0.

    Regrouping by it gives right-padded sequences, so a causal mask is all that attention needs."""
    slot_T: Tensor
    """Flat place (s * L + column) at which each token's attention output is found."""
    source_R: Tensor
    """Token whose hidden state predicts each response token."""
    target_R: Tensor
    """The response tokens, sequence after sequence."""
    seq_R: Tensor
    """Position, within ``members``, of the sequence of each response token."""
    members: tuple[int, ...]
    """Sequences of this row, by their index in the collection, in order."""

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.members)


def pack_row(a_bin: Bin, sequences: abc.Sequence[Sequence], device: torch.device) -> PackedRow:
    """Lay out the units of one bin.

    Args:
        a_bin: at least one unit; siblings within a unit have the same prompt.
        sequences: the collection, indexed by the units' members.
        device: where the tensors go.
    """
    parts: list[np.ndarray] = []
    members: list[int] = []
    prompt_start: list[int] = []
    response_start: list[int] = []
    owner: list[int] = []  # of each part: the sequence whose attention output its tokens take
    at = 0
    for unit in a_bin:
        first = sequences[unit.members[0][0]]
        start = at
        parts.append(first.tokens[: unit.prompt])
        owner.append(len(members))
        at += unit.prompt
        for index, response in unit.members:
            owner.append(len(members))
            members.append(index)
            prompt_start.append(start)
            response_start.append(at)
            parts.append(sequences[index].tokens[unit.prompt : -1])
            at += response - 1
    prompt_S = np.array([unit.prompt for unit in a_bin for _ in unit.members])
    response_S = np.array([n for unit in a_bin for _, n in unit.members])
    return _finish(
        parts=parts,
        owner=np.array(owner),
        members=tuple(members),
        prompt_S=prompt_S,
        response_S=response_S,
        prompt_start_S=np.array(prompt_start),
        response_start_S=np.array(response_start),
        target_R=np.concatenate([sequences[i].tokens[sequences[i].prompt_len :] for i in members]),
        device=device,
    )


def _finish(
    *,
    parts: list[np.ndarray],
    owner: np.ndarray,
    members: tuple[int, ...],
    prompt_S: np.ndarray,
    response_S: np.ndarray,
    prompt_start_S: np.ndarray,
    response_start_S: np.ndarray,
    target_R: np.ndarray,
    device: torch.device,
) -> PackedRow:
    token_T = np.concatenate(parts)
    fed_S = prompt_S + response_S - 1
    longest = int(fed_S.max())
    column_L = np.arange(longest)[None, :]
    prompt_column = column_L < prompt_S[:, None]
    row_SL = np.where(
        prompt_column,
        prompt_start_S[:, None] + column_L,
        response_start_S[:, None] + column_L - prompt_S[:, None],
    )
    row_SL[column_L >= fed_S[:, None]] = 0
    predicts_SL = (column_L >= prompt_S[:, None] - 1) & (column_L < fed_S[:, None])
    # A part starts its positions at 0 (prompt) or right after its prompt (response).
    sizes = np.array([len(part) for part in parts])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    owner_T = np.repeat(owner, sizes)
    is_prompt = np.isin(starts, prompt_start_S) & (sizes > 0)
    base = np.where(is_prompt, 0, prompt_S[owner])
    position_T = np.arange(len(token_T)) - np.repeat(starts - base, sizes)
    arrays = {
        "token_T": token_T,
        "position_T": position_T,
        "row_SL": row_SL,
        "slot_T": owner_T * longest + position_T,
        "source_R": row_SL[predicts_SL],
        "target_R": target_R,
        "seq_R": np.repeat(np.arange(len(members)), response_S),
    }
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
        for name, array in arrays.items()
    }
    return PackedRow(members=members, **tensors)
