"""Kernels of flash-attn-4 and quack-kernels (written in CuTe), where a GPU and packages allow them.

They do what torch's own do slowly: attention over rows of unlike lengths, the gated activation as
part of the product before it, and the product of the output layer. SGLang brings both packages.

This is the one file that knows them. Their public attention functions are autograd functions that
no compiled layer can hold, so it calls what lies under those, which may change with any version and
is not right for every shape: before a process relies on them they are run once on small inputs,
against plain torch (``cute_check``). What is not near it is torch's own, and the log says so.
"""

# pyright: basic, reportMissingImports=false
# The packages are not installed everywhere.
from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from platformdirs import user_cache_path
from torch import Tensor

from runtime.caches.parts import PARTS
from runtime.errors import ConfigError
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.trainer.settings import KernelChoice
from runtime.trainer.torch.flash import Rows, Three

# Legend: T tokens of the row, N keys, H heads, K key/value heads, E head size, S sequences,
# D hidden size, I inner size, V vocabulary.

PACKAGES = ("flash-attn-4", "quack-kernels")
_GENERATIONS = (9, 10)
"""Hopper and Blackwell."""
MOST_SEQUENCES = 256
"""Rows of more are attended to by torch's own: flash-attn-4 has other kernels for them, which the
check does not reach."""
ALLOWED_ERROR = 0.02
"""Of bf16 results against float32, in norm; seen: 0.002 to 0.003."""
_CACHES = {
    "flash_attn": "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "quack": "QUACK_CACHE_ENABLED",
}
"""By part of the compiler caches: the variable that says whether the package keeps one."""
_ALIGNED = 8
"""Elements of 2 bytes in the 16 that a row is copied by."""


class Heads(NamedTuple):
    """Attention heads of a model, as far as kernels are made for them."""

    per_group: int
    """Query heads that share a key/value head."""
    size: int


class Taken(NamedTuple):
    """Which kernels a process takes from here; torch's own otherwise."""

    attention: bool
    products: bool
    """The gated activation in its product, and the output layer."""


def settle(
    choice: KernelChoice, device: torch.device, dtype: torch.dtype, heads: Iterable[Heads]
) -> Taken:
    """What this process takes.

    Args:
        choice: "auto": what can be had; "cute": all, or an error.
        device: of the weights.
        dtype: of the forward pass.
        heads: of all models that will run; looked at only where kernels may be had.

    Raises:
        ConfigError: if all are asked for and one cannot be had, with the reason.
    """
    if choice == "torch":
        return Taken(attention=False, products=False)
    reason = missing(device, dtype)
    if reason is None:
        steady = torch.are_deterministic_algorithms_enabled()
        by_attention = [
            _wrong_attention(device.index or 0, one, steady) for one in sorted(set(heads))
        ]
        reasons = [*by_attention, _wrong_products(device.index or 0)]
    else:
        reasons = [reason] * 2
    if choice == "cute" and any(reasons):
        raise ConfigError(
            f"core.attention_backend asks for kernels of {' and '.join(PACKAGES)}, but "
            f'{next(filter(None, reasons))}; "auto" takes what can be had',
            kernels=choice,
        )
    return Taken(attention=not any(reasons[:-1]), products=not reasons[-1])


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why none of these kernels can be had for weights like these; None where they may."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _GENERATIONS:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return f"they are for Hopper and Blackwell GPUs, and this is {name}"
    if dtype != torch.bfloat16:
        return f'they are for model.dtype = "bfloat16", and this is {dtype}'
    try:
        _versions()
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return None


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


@cache
def _wrong_attention(index: int, heads: Heads, steady: bool) -> str | None:
    """What is wrong with attention for these heads; looked at once per process and GPU.

    ``steady``: gradients are added up in a fixed order, as torch is set; another kernel does that.
    """
    from runtime.trainer.torch.cute_check import attention_errors

    what = f"attention with {heads}{', deterministic' if steady else ''}"
    return _wrong(what, index, partial(attention_errors, index, heads))


@cache
def _wrong_products(index: int) -> str | None:
    from runtime.trainer.torch.cute_check import product_errors

    return _wrong("products", index, partial(product_errors, index))


def _wrong(what: str, index: int, errors: Callable[[], dict[str, float]]) -> str | None:
    # Before the packages are imported. By GPU: not all of theirs are kept by what they are for.
    major, minor = torch.cuda.get_device_capability(index)
    home = user_cache_path("milepost") / f"sm{major}{minor}"
    os.environ.update(cache_variables(os.environ, home))
    try:
        bad = {name: round(e, 4) for name, e in errors().items() if not e < ALLOWED_ERROR}
    except Exception as error:  # any: a function of theirs has changed, or does not compile
        reason = f"{type(error).__name__}: {error}"
    else:
        if not bad:
            return None
        reason = f"relative errors {bad} are above {ALLOWED_ERROR}"
    reason = f"{what} of {_versions()} cannot be used here: {reason}"
    get_logger().warning(Event.LIBRARY_WARNED, logger=PACKAGES[0], message=reason)
    return reason


def cache_variables(told: Mapping[str, str], home: Path) -> dict[str, str]:
    """What tells the packages to keep what they compile in folders below ``home``.

    Left to themselves they keep libraries, which they load again, in folders of guessable names
    below the shared temporary one. Where ``home`` cannot be the user's alone they keep nothing.

    Args:
        told: the environment; who is told of a folder there, or to keep nothing, is left at that.
        home: made where it is missing.
    """
    variables: dict[str, str] = {}
    for part, whether in _CACHES.items():
        (where,) = PARTS[part]
        is_own = where in told or _is_own(home / part)
        variables[whether] = told.get(whether, "1") if is_own else "0"
        if is_own and where not in told:
            variables[where] = str(home / part)
    return variables


def _is_own(folder: Path) -> bool:
    """It is there, this user can write to it, and nobody else can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not is_shared and os.access(folder, os.W_OK | os.X_OK)


def takes_product(weight_JD: Tensor) -> bool:
    """A product with a weight of this shape is there."""
    return all(size % _ALIGNED == 0 for size in weight_JD.shape)


def attention(
    query_THE: Tensor, key_NKE: Tensor, value_NKE: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """See ``flash.flash``."""
    from flash_attn.cute.interface import _flash_attn_fwd

    tensors, told = _lying((query_THE, key_NKE, value_NKE), rows)
    made = _flash_attn_fwd(*tensors, return_lse=True, **told)
    return made[0].view(query_THE.shape), made[1]


def attention_backward(
    grad_THE: Tensor, inputs: Three, out_THE: Tensor, log_sum: Tensor, rows: Rows
) -> Three:
    """Gradients by queries, keys and values; see ``flash``."""
    from flash_attn.cute.interface import _flash_attn_bwd

    is_exact = torch.are_deterministic_algorithms_enabled()
    tensors, told = _lying((*inputs, out_THE, grad_THE), rows)
    made = _flash_attn_bwd(*tensors, log_sum, deterministic=is_exact, **told)
    # They lie as what they are the gradient of does; graphs were promised contiguous ones.
    by_query, by_key, by_value = (
        g.contiguous().view(x.shape) for g, x in zip(made, inputs, strict=True)
    )
    return by_query, by_key, by_value


def _lying(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[tuple[Tensor, ...], dict[str, object]]:
    """Tensors as the library wants them, and how it is told where sequences lie."""
    told: dict[str, object] = {"softmax_scale": rows.scale, "causal": True}
    if rows.is_rectangle:
        return tuple(x.view(-1, rows.longest, *x.shape[1:]) for x in tensors), told
    told |= {
        "cu_seqlens_q": rows.query_ends_S1,
        "cu_seqlens_k": rows.key_ends_S1,
        "max_seqlen_q": rows.longest,
        "max_seqlen_k": rows.longest,
    }
    return tensors, told


def gated_product(x_TD: Tensor, weight_JD: Tensor, *, keeps: bool) -> tuple[Tensor, Tensor]:
    """See ``gate.gated_product``."""
    from quack.gemm_interface import gemm_act

    pairs_TJ, out_TI = gemm_act(
        x_TD, weight_JD.t(), activation="swiglu", store_preact=keeps, concat_layout=("B",),
        tuned=False,
    )  # fmt: skip
    return out_TI, x_TD.new_empty(0) if pairs_TJ is None else pairs_TJ


def product(hidden_RD: Tensor, weight_VD: Tensor, out_RV: Tensor | None = None) -> Tensor:
    """``hidden @ weight.T``, [R, V]."""
    from quack.gemm_interface import gemm

    return gemm(hidden_RD, weight_VD.t(), out=out_RV, tuned=False)
