"""In place of SGLang's compiled kernels on a CPU without AMX: what its plain path still calls.

``forward_native`` needs no kernels; a few names are imported all the same, and two are called. All
others raise when they are called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__version__ = "0.0.0+milepost.cpu"
__path__: list[str] = []


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row, [start, end), from one flat list."""
    begin = 0
    for row, request in enumerate(req_pool_indices.tolist()):
        start, end = int(start_offset[row]), int(end_offset[row])
        slots = out_cache_loc[begin : begin + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        begin += end - start


def _topk_softmax(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the ``topk`` likeliest experts; a bias changes the choice only."""
    share_TE = torch.softmax(gating_output.float(), dim=-1)
    chosen_by = share_TE if correction_bias is None else share_TE + correction_bias
    ids_TK = torch.topk(chosen_by, topk, dim=-1).indices
    weight_TK = share_TE.gather(-1, ids_TK)
    if renormalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK, ids_TK.to(torch.int32)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define(
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)"
)
_library.impl("topk_softmax_cpu", _topk_softmax, "CPU")


class _HostMemory:
    """In place of the CUDA runtime, where a host buffer is pinned for routed experts."""

    def cudaHostRegister(self, *_: object) -> int:
        return 0

    def cudaHostUnregister(self, *_: object) -> int:
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = _HostMemory


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this CPU")

    return missing
