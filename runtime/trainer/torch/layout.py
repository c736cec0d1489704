"""The packed row of one micro-batch: where each token lies and who may look at whom.

Legend: T tokens of the row; S sequences; L longest sequence fed; R response tokens.

Siblings share their prompt: its tokens lie in the row once, followed by each sibling's response::

    prompt a | response a1 | response a2 | prompt b | response b1 ...

The last token of a response is predicted and never fed, so it is not in the row at all.

Attention reads a row in one of three shapes (``Shape``), chosen here because it follows from the
lengths alone: "rectangular" when all sequences are equally long and nothing is shared, so that the
row *is* [S, L]; "padded", regrouped to [S, L]; "ragged", as it lies, with K/V of shared prompts
repeated.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from runtime.trainer.packing import Bin
from runtime.trainer.protocol import Sequence
from runtime.trainer.torch.context import ContextGroup, Part

Shape = Literal["rectangular", "padded", "ragged"]
Kernel = Literal["torch", "cute"]
"""What attends to a row as it lies: torch's variable-length kernel, or flash-attn-4's."""

_RAGGED_COST: dict[Kernel, float] = {"torch": 1.9, "cute": 1.1}
"""Time of one (query, key) pair there over that in the kernel that takes padded sequences; forward
and backward, bf16, head size 128, measured on one H200."""
_REGROUP_COST = 1.3
"""Time of padded attention with the regrouping around it, over attention alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch without padding; all tensors int64 unless said.

    Where ranks share the row, ``token_T``, ``position_T`` and ``source_R`` are of this rank's part,
    everything else is of the whole row.
    """

    shape: Shape
    token_T: Tensor
    position_T: Tensor
    row_SL: Tensor
    """Token of the row at each place of each sequence, prompt first; unused places point to 0.

    Regrouping by it gives right-padded sequences, so a causal mask is all that attention needs.
    Others have no use for it but its shape: [S, L] of nothing where rectangular, [0, L] ragged."""
    slot_T: Tensor
    """Flat place (s * L + column) of each token's attention output; [0] unless "padded"."""
    key_K: Tensor
    """Ragged with a shared prompt: token of the row of each key, sequence after sequence; [0] where
    keys lie as the row does."""
    query_ends_S1: Tensor
    """int32 [S + 1] where each sequence's queries begin in the row, then T; a shared prompt counts
    to its first sibling. [0] unless "ragged"."""
    key_ends_S1: Tensor
    """int32 [S + 1], the same for keys."""
    source_R: Tensor
    """Token whose hidden state predicts each response token."""
    target_R: Tensor
    """The response tokens, sequence after sequence."""
    seq_R: Tensor
    """Position, within ``members``, of the sequence of each response token."""
    members: tuple[int, ...]
    """Sequences of this row, by their index in the collection, in order."""
    kernel: Kernel | None = None
    """What attends to the row as it lies; None where nothing can, as on a CPU."""
    part: Part | None = None
    """None where no ranks share the row."""

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.members)


def pack_row(
    a_bin: Bin,
    sequences: abc.Sequence[Sequence],
    device: torch.device,
    *,
    kernel: Kernel | None = None,
    context: ContextGroup | None = None,
) -> PackedRow:
    """Lay out the units of one bin.

    Args:
        a_bin: at least one unit; siblings within a unit have the same prompt.
        sequences: the collection, indexed by the units' members.
        device: where the tensors go.
        kernel: what takes rows as they lie, for this device and dtype; None: nothing.
        context: the ranks that share the row; None: it is this rank's alone.
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
        kernel=kernel,
        context=context,
    )


def choose_shape(query_S: np.ndarray, key_S: np.ndarray, *, kernel: Kernel | None) -> Shape:
    """The cheapest way to attend within sequences of these lengths.

    Args:
        query_S: tokens of the row that each sequence asks for: its own, and the prompt where it is
            the first of its siblings.
        key_S: tokens each sequence sees.
        kernel: what takes rows as they lie.
    """
    longest = int(key_S.max())
    if (query_S == longest).all():
        return "rectangular"
    if kernel is None:
        return "padded"
    # A query sees every key up to its own place; queries are the last ones of their sequence.
    pairs = float((query_S * (key_S - (query_S - 1) / 2)).sum())
    padded_pairs = len(key_S) * longest * (longest + 1) / 2
    return "ragged" if pairs * _RAGGED_COST[kernel] < padded_pairs * _REGROUP_COST else "padded"


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
    kernel: Kernel | None,
    context: ContextGroup | None,
) -> PackedRow:
    token_T = np.concatenate(parts)
    fed_S = prompt_S + response_S - 1
    longest = int(fed_S.max())
    if len(token_T) == len(members) * longest:
        return _rectangle(token_T, members, prompt_S, longest, target_R, device, kernel, context)
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
    query_S = np.bincount(owner_T, minlength=len(members))
    shape = choose_shape(query_S, fed_S, kernel=kernel)
    none = np.zeros(0)
    is_ragged, is_shared = shape == "ragged", len(token_T) != fed_S.sum()
    real_SL = column_L < fed_S[:, None]
    long = {
        "token_T": token_T,
        "position_T": position_T,
        "row_SL": row_SL[:0] if is_ragged else row_SL,
        "slot_T": owner_T * longest + position_T if shape == "padded" else none,
        "key_K": row_SL[real_SL] if is_ragged and is_shared else none,
        "source_R": row_SL[predicts_SL],
        "target_R": target_R,
        "seq_R": np.repeat(np.arange(len(members)), response_S),
    }
    short = {
        "query_ends_S1": np.concatenate([[0], np.cumsum(query_S)]) if is_ragged else none,
        "key_ends_S1": np.concatenate([[0], np.cumsum(fed_S)]) if is_ragged else none,
    }
    tensors, part = _shared(long, device, context)
    tensors |= _together(short, torch.int32, device)
    return PackedRow(shape=shape, kernel=kernel, members=members, part=part, **tensors)


def _rectangle(
    token_T: np.ndarray,
    members: tuple[int, ...],
    prompt_S: np.ndarray,
    longest: int,
    target_R: np.ndarray,
    device: torch.device,
    kernel: Kernel | None,
    context: ContextGroup | None,
) -> PackedRow:
    """A row that *is* its sequences: all equally long, nothing shared. Most of it is counting."""
    count, none = len(members), np.zeros(0)
    column_L = np.arange(longest)
    long = {
        "token_T": token_T,
        "position_T": np.tile(column_L, count),
        "slot_T": none,
        "key_K": none,
        "source_R": np.flatnonzero(column_L[None, :] >= prompt_S[:, None] - 1),
        "target_R": target_R,
        "seq_R": np.repeat(np.arange(count), longest + 1 - prompt_S),
    }
    tensors, part = _shared(long, device, context)
    nothing = tensors["slot_T"]
    ends = nothing.to(torch.int32)
    return PackedRow(
        shape="rectangular",
        kernel=kernel,
        members=members,
        row_SL=nothing.new_empty(1).expand(count, longest),
        query_ends_S1=ends,
        key_ends_S1=ends,
        part=part,
        **tensors,
    )


def _shared(
    row: dict[str, np.ndarray], device: torch.device, context: ContextGroup | None
) -> tuple[dict[str, Tensor], Part | None]:
    """A row's int64 tensors on ``device``, and this rank's part of it."""
    if context is None:
        return _together(row, torch.int64, device), None
    divided, sizes = context.divide(row)
    tensors = _together(divided, torch.int64, device)
    place_N = tensors.pop("place_N")
    part = Part(
        rank=context.rank,
        group=context.name,
        sizes=sizes,
        spare=sum(sizes) - len(row["token_T"]),
        place_N=place_N,
    )
    return tensors, part


def _together(
    arrays: dict[str, np.ndarray], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Tensors of one dtype on ``device``, sent as one, from where they are put together."""
    sizes = [array.size for array in arrays.values()]
    on_gpu = device.type == "cuda" and sum(sizes) > 0
    whole = torch.empty(sum(sizes), dtype=dtype, pin_memory=on_gpu)
    flat = [array.ravel() for array in arrays.values()]
    np.concatenate(flat, out=whole.numpy(), casting="unsafe")
    parts = whole.to(device, non_blocking=on_gpu).split(sizes)
    return {
        name: part.view(array.shape)
        for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on ``device``; on a GPU the copy is only ordered, so that the host runs on."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    if not tensor.numel():
        return tensor.new_empty(0, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)
