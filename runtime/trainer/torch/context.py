"""One packed row on several ranks: its tokens divided, and put together where a result needs that.

Everything in a model but attention looks at one token at a time, so each rank of a context group
runs an equal slice of the row. For attention the ranks exchange slices of tokens for slices of
heads: there each has the row whole, with some of the heads, and any attention over packed rows
does. Log-probs are put together again, so that a loss sees whole responses; what each rank then
sends back is the gradient of its own tokens alone, and gradients add up over all ranks.

Legend: T tokens of the row, t those of this rank, P ranks of the group, H heads, K key/value heads,
h and k those of one rank, D head size, R response tokens of the row, N those predicted here.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses), attention by exchange of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from runtime.errors import ConfigError

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Ranks that have each row between them."""

    rank: int
    """This one within the group."""
    size: int
    """P, above 1."""
    name: str
    """Of the process group."""

    def divide(self, row: Arrays) -> tuple[Arrays, tuple[int, ...]]:
        """Leave this rank's part of a row.

        Args:
            row: with ``token_T``, ``position_T`` and ``source_R``.

        Returns:
            The row with tokens, positions and sources of this rank, these counted from its first
            token, and with ``place_N``; and the tokens of each rank, at least 1. A rank may have
            none that predicts. In a row of less than P tokens the last ranks get its first one,
            spare: models cannot run without any, and an exchange of nothing would be left out by
            a compiler, on one rank alone.
        """
        tokens = len(row["token_T"])
        sizes = shares(max(tokens, self.size), self.size)
        start = sum(sizes[: self.rank])
        end = start + sizes[self.rank]
        mine = slice(start, end) if start < tokens else slice(0, 1)
        source_R = row["source_R"]
        place_N = np.flatnonzero((source_R >= start) & (source_R < end))
        part: Arrays = {
            "token_T": row["token_T"][mine],
            "position_T": row["position_T"][mine],
            "source_R": source_R[place_N] - start,
            "place_N": place_N,
        }
        return row | part, sizes


def shares(tokens: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank, in the row's order; they differ by at most one."""
    each, more = divmod(tokens, ranks)
    return tuple(each + (rank < more) for rank in range(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank knows of the row whose slice it has."""

    rank: int
    group: str
    """Name of the process group."""
    sizes: tuple[int, ...]
    """Tokens of each rank of the group, in the row's order; none is 0."""
    spare: int
    """Of those, tokens after the row's T that take part in nothing; 0 but in rows of less than P.
    """
    place_N: Tensor
    """int64 [N] which of the row's response tokens are predicted here, ascending."""


def to_heads(part: Part, *slices: Tensor) -> list[Tensor]:
    """From this rank's tokens with all heads to all tokens with this rank's heads, in one exchange.

    Args:
        part: of this rank.
        slices: [1, H, t, D] queries, keys, values; their numbers of heads divide by P.

    Returns:
        [1, h, T, D] of each.
    """
    ranks, own = len(part.sizes), part.sizes[part.rank]
    heads = [x.shape[1] // ranks for x in slices]
    # [P, t, h, D] of each, then one copy: what goes to a rank lies together.
    by_rank = [
        x.squeeze(0).unflatten(0, (ranks, h)).transpose(1, 2)
        for x, h in zip(slices, heads, strict=True)
    ]
    joint = torch.cat(by_rank, 2).flatten(0, 1)
    whole = exchange(joint, [own] * ranks, list(part.sizes), part.group)
    if part.spare:
        whole = whole[: -part.spare]
    parts = whole.split(heads, 1)
    return [x_ThD.transpose(0, 1)[None] for x_ThD in parts]


def to_tokens(part: Part, out_1ThD: Tensor) -> Tensor:
    """The way back: [1, T, h, D] of this rank's heads to [1, t, H, D] of its tokens."""
    ranks, own = len(part.sizes), part.sizes[part.rank]
    out_ThD = out_1ThD.squeeze(0)
    if part.spare:
        out_ThD = pad(out_ThD, (0, 0, 0, 0, 0, part.spare))
    mine = exchange(out_ThD, list(part.sizes), [own] * ranks, part.group)
    return mine.view(ranks, own, *mine.shape[1:]).transpose(0, 1).flatten(1, 2)[None]


# An operator of its own, so that a compiler takes it as it is, sizes that change included. To it a
# collective is a function like any other: it may leave out one whose result is not needed. So no
# result is empty (``Part.sizes``), and the one order there is follows from the data: each exchange
# of a layer needs what came of the one before. As an ordered effect it cannot be declared: graphs
# that recompute a layer then fail (torch 2.13).
@torch.library.custom_op("milepost::exchange", mutates_args=())
def exchange(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Give each rank of a group some rows of ``x`` and get theirs; collective.

    Args:
        x: [sum of ``send``, ...], for one rank after another.
        send: rows for each rank.
        receive: rows from each rank; what it sends to this one.
        group: name of the process group.

    Returns:
        [sum of ``receive``, ...], from one rank after another. The gradient goes the way back.
    """
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=_resolved(group))
    return out


@exchange.register_fake
def _(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return x.new_empty(sum(receive), *x.shape[1:])


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.send, ctx.receive, ctx.group = inputs


def _send_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


exchange.register_autograd(_send_back, setup_context=_keep_sizes)


def _resolved(group: str) -> dist.ProcessGroup:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(group)


class _PutTogether(torch.autograd.Function):
    """Rows of all ranks of a group on each of them."""

    @staticmethod
    def forward(ctx: Any, mine_N: Tensor, place_N: Tensor, rows: int, group: str) -> Tensor:
        ctx.save_for_backward(place_N)
        whole = mine_N.new_zeros(rows, *mine_N.shape[1:])
        whole[place_N] = mine_N
        dist.all_reduce(whole, group=_resolved(group))
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Every rank makes the same loss of the same whole, so nothing is to be added up.
        (place_N,) = ctx.saved_tensors
        return grads[0].index_select(0, place_N), None, None, None


def put_together(part: Part, mine_N: Tensor, rows: int) -> Tensor:
    """Figures of this rank's N response tokens to those of all R of the row; collective.

    Args:
        part: of this rank.
        mine_N: [N, ...].
        rows: R.

    Returns:
        [R, ...], bit by bit the same on every rank of the group. Its gradient goes to the rank that
        a row came from, provided that all ranks make the same use of it.
    """
    return cast("Tensor", _PutTogether.apply(mine_N, part.place_N, rows, part.group))


def divisors(number: int) -> list[int]:
    """All of them, ascending: what an error offers instead of a size that does not divide."""
    return [size for size in range(1, number + 1) if number % size == 0]


def require_divisible(config: Any, ranks: int, path: str) -> None:
    """Refuse a model whose heads cannot be divided among the ranks of a context group.

    Args:
        config: of the model.
        ranks: P.
        path: its folder, for the message.

    Raises:
        ConfigError: if P does not divide heads and key/value heads.
    """
    heads = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    common = math.gcd(heads, keys)
    if common % ranks:
        raise ConfigError(
            f"core.context = {ranks} does not divide the {heads} heads and {keys} key/value heads "
            f"of {path}, and ranks that share a row have some heads each: set core.context to one "
            f"of {divisors(common)}",
            context=ranks,
            heads=heads,
            kv_heads=keys,
        )
