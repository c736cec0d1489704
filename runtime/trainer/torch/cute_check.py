"""The kernels of ``cute`` against plain torch on small inputs, before a process relies on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.trainer.torch import cute
from runtime.trainer.torch.flash import flash, plain_attention
from runtime.trainer.torch.gate import gated_product, plain_product

_HEADS, _GROUPS, _SIZE = 4, 2, 64
_ROWS = (
    # Queries and keys by sequence: a prompt shared by two, one of them without queries of its own.
    ((130, 0, 70), (130, 130, 200)),
    # Equally long, as one rectangle.
    ((96, 96), (96, 96)),
)


def largest_errors(device: torch.device) -> dict[str, float]:
    """Largest relative error, in norm, by kernel: bf16 results and gradients against float32.

    Leaves the state of the process' random generators as it was.
    """
    made = torch.Generator(device).manual_seed(0)
    with torch.enable_grad(), torch.cuda.device(device):
        found = {
            f"attention of {queries}": _attention_error(made, queries, keys)
            for queries, keys in _ROWS
        }
        found["gated product"] = _gated_error(made)
        found["product"] = _product_error(made)
    return found


def _attention_error(
    made: torch.Generator, queries: tuple[int, ...], keys: tuple[int, ...]
) -> float:
    is_rectangle = len(set(queries)) == 1 and queries == keys
    ends = [
        torch.tensor([sum(some[:i]) for i in range(len(some) + 1)]).int().to(made.device)
        for some in (queries, keys)
    ]
    given = [_normal(made, sum(queries), _HEADS, _SIZE)]
    given += [_normal(made, sum(keys), _GROUPS, _SIZE) for _ in range(2)]
    query_ends, key_ends = (end[:0] if is_rectangle else end for end in ends)
    scale = _SIZE**-0.5

    def fast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash(query, key, value, query_ends, key_ends, max(keys), scale)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Of its own, not the operation's: its gradient is autograd's.
        return plain_attention(query, key, value, ends[0], ends[1], max(keys), scale)[0]

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
        wanted = linear(hidden.float(), weight.float())
        return _distance(cute.product(hidden, weight), wanted)


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
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad(got, narrow, grad),
        torch.autograd.grad(want, wide, grad.float()),
        strict=True,
    )
    return max(_distance(a, b) for a, b in pairs)


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got.detach().float() - want.detach()).norm() / want.detach().norm())


def _normal(made: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=made, device=made.device).bfloat16()
