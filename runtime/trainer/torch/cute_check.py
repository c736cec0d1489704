"""The kernels of ``cute`` against plain torch on small inputs, before a process relies on them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.trainer.torch import cute
from runtime.trainer.torch.flash import Rows, flash, plain_attention
from runtime.trainer.torch.gate import gated_product, plain_product

_GROUPS = 2
_ROWS = (
    # Queries and keys by sequence: a prompt shared by two, one of them without queries of its own.
    ((130, 0, 70), (130, 130, 200)),
    # All shorter than any block.
    ((9, 20), (9, 20)),
    # Equally long, as one rectangle.
    ((150, 150), (150, 150)),
)


def attention_errors(index: int, heads: cute.Heads) -> dict[str, float]:
    """Largest relative error, in norm, of bf16 results and gradients against float32, by row.

    Leaves the state of the process' random generators as it was.
    """
    with torch.enable_grad(), torch.cuda.device(index):
        made = torch.Generator("cuda").manual_seed(0)
        return {
            f"queries {queries}, keys {keys}": _attention_error(made, queries, keys, heads)
            for queries, keys in _ROWS
        }


def product_errors(index: int) -> dict[str, float]:
    """The same of the products, by kernel."""
    with torch.enable_grad(), torch.cuda.device(index):
        made = torch.Generator("cuda").manual_seed(0)
        return {"gated product": _gated_error(made), "product": _product_error(made)}


def _attention_error(
    made: torch.Generator, queries: tuple[int, ...], keys: tuple[int, ...], heads: cute.Heads
) -> float:
    ends = [torch.tensor([0, *accumulate(some)]).int().to(made.device) for some in (queries, keys)]
    is_rectangle = len(set(queries)) == 1 and queries == keys
    query_ends, key_ends = (end[:0] if is_rectangle else end for end in ends)
    given = [_normal(made, sum(queries), _GROUPS * heads.per_group, heads.size)]
    given += [_normal(made, sum(keys), _GROUPS, heads.size) for _ in range(2)]
    scale = heads.size**-0.5

    def fast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash(query, key, value, query_ends, key_ends, max(keys), scale)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Not the operation: the gradient is autograd's.
        rows = Rows(ends[0], ends[1], max(keys), scale)
        return plain_attention(query, key, value, rows)[0]

    return _error(made, fast, plain, given)


def _gated_error(made: torch.Generator) -> float:
    given = [_normal(made, 70, 64), _normal(made, 2 * 96, 64) / 8]
    return _error(
        made,
        lambda x, weight: gated_product(x, weight, True)[0],
        lambda x, weight: plain_product(x, weight, keeps=False)[0],
        given,
    )


def _product_error(made: torch.Generator) -> float:
    hidden, weight = _normal(made, 70, 64), _normal(made, 96, 64)
    with torch.no_grad():
        return _distance(cute.product(hidden, weight), linear(hidden.float(), weight.float()))


def _error(
    made: torch.Generator,
    fast: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    given: list[Tensor],
) -> float:
    narrow = [x.clone().requires_grad_() for x in given]
    wide = [x.float().requires_grad_() for x in given]
    got, want = fast(*narrow), plain(*wide)
    grad = _normal(made, *got.shape)
    by_narrow = torch.autograd.grad(got, narrow, grad)
    by_wide = torch.autograd.grad(want, wide, grad.float())
    pairs = zip((got, *by_narrow), (want, *by_wide), strict=True)
    return max(_distance(a, b) for a, b in pairs)


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got.detach().float() - want.detach()).norm() / want.detach().norm())


def _normal(made: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=made, device=made.device).bfloat16()
