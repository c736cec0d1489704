"""Kernels of flash-attn-4 and quack-kernels (written in CuTe), where a GPU and packages allow them.

They do what torch's own do slowly: attention over rows of unlike lengths, the gated activation as
part of the product before it, and the product of the output layer. SGLang brings both packages.

This is the one file that knows them. Their public attention functions are autograd functions that
no compiled layer can hold, so it calls what lies under those, which may change with any version:
before a process relies on them they are run once on small inputs, against plain torch.
"""

# pyright: basic, reportMissingImports=false
# The packages are not installed everywhere.
from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from runtime.errors import ConfigError
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.trainer.settings import KernelChoice

# Legend: T tokens of the row, N keys, H heads, K key/value heads, E head size, S sequences,
# D hidden size, I inner size, V vocabulary.

Three = tuple[Tensor, Tensor, Tensor]

PACKAGES = ("flash-attn-4", "quack-kernels")
_GENERATIONS = (9, 10)
"""Hopper and Blackwell."""
_LARGEST_HEAD = 128
"""Hopper would take 256."""
_ALIGNED = 8
"""Elements of 2 bytes in the 16 that a row is copied by."""


def settle(choice: KernelChoice, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this process takes these kernels.

    Args:
        choice: "auto": where they can be had; "cute": they must be.
        device: of the weights.
        dtype: of the forward pass.

    Raises:
        ConfigError: if they are asked for and cannot be had, with the reason.
    """
    if choice == "torch":
        return False
    reason = missing(device, dtype)
    if reason is not None and choice == "cute":
        raise ConfigError(
            f"core.attention_backend asks for kernels of {' and '.join(PACKAGES)}, but {reason}; "
            '"auto" takes them where they can be had',
            kernels=choice,
            reason=reason,
        )
    return reason is None


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot be had for weights like these; None where they can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _GENERATIONS:
        return f"they are for Hopper and Blackwell GPUs, and this is {_name(device)}"
    if dtype != torch.bfloat16:
        return f'they are for model.dtype = "bfloat16", and this is {dtype}'
    try:
        versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return _wrong(versions, device.index or 0)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@cache
def _wrong(versions: str, index: int) -> str | None:
    """What is wrong with the installed versions; looked at once per process and GPU."""
    from runtime.trainer.torch.cute_check import largest_errors

    try:
        errors = largest_errors(torch.device("cuda", index))
    except Exception as error:  # any: a function of theirs has changed, or does not compile
        reason = f"{type(error).__name__}: {error}"
    else:
        bad = {name: round(e, 4) for name, e in errors.items() if not e < ALLOWED_ERROR}
        if not bad:
            return None
        reason = f"relative errors {bad} are above {ALLOWED_ERROR}"
    reason = f"{versions} cannot be used here: {reason}"
    get_logger().warning(Event.LIBRARY_WARNED, logger=PACKAGES[0], message=reason)
    return reason


ALLOWED_ERROR = 0.02
"""Of bf16 results against float32, in norm; seen: 0.002 to 0.003."""


def takes_heads(size: int) -> bool:
    """Attention is there for heads of this size."""
    return size % _ALIGNED == 0 and size <= _LARGEST_HEAD


def takes_product(weight_JD: Tensor) -> bool:
    """A product with a weight of this shape is there."""
    return all(size % _ALIGNED == 0 for size in weight_JD.shape)


def attention(
    query_THE: Tensor,
    key_NKE: Tensor,
    value_NKE: Tensor,
    ends: tuple[Tensor, Tensor] | None,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See ``flash.flash``."""
    from flash_attn.cute.interface import _flash_attn_fwd

    if ends is None:
        made = _flash_attn_fwd(
            *_rectangles((query_THE, key_NKE, value_NKE), longest),
            softmax_scale=scale, causal=True, return_lse=True,
        )  # fmt: skip
    else:
        made = _flash_attn_fwd(
            query_THE, key_NKE, value_NKE, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1],
            max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scale, causal=True, return_lse=True,
        )  # fmt: skip
    return made[0].view(query_THE.shape), made[1]


def attention_backward(
    grad_THE: Tensor,
    query_THE: Tensor,
    key_NKE: Tensor,
    value_NKE: Tensor,
    out_THE: Tensor,
    log_sum: Tensor,
    ends: tuple[Tensor, Tensor] | None,
    longest: int,
    scale: float,
) -> Three:
    """Gradients by queries, keys and values; see ``flash``."""
    from flash_attn.cute.interface import _flash_attn_bwd

    where = {}
    tensors = (query_THE, key_NKE, value_NKE, out_THE, grad_THE)
    if ends is None:
        tensors = _rectangles(tensors, longest)
    else:
        where = {
            "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1],
            "max_seqlen_q": longest, "max_seqlen_k": longest,
        }  # fmt: skip
    made = _flash_attn_bwd(
        *tensors, log_sum, softmax_scale=scale, causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(), **where,
    )  # fmt: skip
    wanted = (query_THE, key_NKE, value_NKE)
    by_query, by_key, by_value = (g.view(x.shape) for g, x in zip(made, wanted, strict=True))
    return by_query, by_key, by_value


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


def _rectangles(tensors: tuple[Tensor, ...], longest: int) -> tuple[Tensor, ...]:
    return tuple(x.view(-1, longest, *x.shape[1:]) for x in tensors)
