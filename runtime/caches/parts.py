"""Where compilers keep what they made: a folder each below one root, and who is told of it.

The environment points the compilers there, in every process that is started later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PARTS: Mapping[str, tuple[str, ...]] = {
    "inductor": ("TORCHINDUCTOR_CACHE_DIR",),
    "triton": ("TRITON_CACHE_DIR",),
    "sglang": ("SGLANG_CACHE_DIR",),
    "sglang_jit": ("SGLANG_JIT_CACHE_DIR",),
    "deep_gemm": ("SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR"),
    "tvm_ffi": ("TVM_FFI_CACHE_DIR",),
    "flashinfer": ("FLASHINFER_WORKSPACE_BASE",),
    "flash_attn": ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",),
    "quack": ("QUACK_CACHE_DIR",),
    "cuda": ("CUDA_CACHE_PATH",),
    "numba": ("NUMBA_CACHE_DIR",),
}
"""Folder of each part below the root, and the variables that point a compiler at it: all that a
server would else keep with the user. SGLang's own CUDA kernels,
most of a first start, are in ``tvm_ffi``, those of newer versions in ``sglang_jit``."""


_SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""Of caches that are off unless asked for."""


def environment(root: Path) -> dict[str, str]:
    """Where every compiler keeps its cache; for the environment of what is started later."""
    places = {name: str(root / part) for part, names in PARTS.items() for name in names}
    return _SWITCHES | places
