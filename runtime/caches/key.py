"""What a compiled kernel depends on: caches are shared where all of it is equal, nowhere else."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from configs.names import read_variable
from runtime.interpreters import answer
from runtime.waits import stretched

ARCHIVES = 2
"""Raised when archives are made another way: older ones are not taken, nor in the way."""
_PACKAGES = (
    "torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "apache-tvm-ffi",
    "transformers", "megatron-core", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl",
)  # fmt: skip
_GPUS = Path("/proc/driver/nvidia/gpus")
_CPU = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags")
_MODEL_FILE = "config.json"
_ASK = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_ASK_S = 60.0
_TOOLKIT = Path("/usr/local/cuda")
_VARIABLES = (
    "TORCH_CUDA_ARCH_LIST", "FLASHINFER_CUDA_ARCH_LIST", "TVM_FFI_CUDA_ARCH_LIST",
    "FLASHINFER_NVCC", "FLASHINFER_JIT_DEBUG",
    "FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS",
    "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS",
    "CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS",
)  # fmt: skip
"""What says to compilers how to go about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """Everything that decides what is compiled."""

    image: str
    """Digest of the image; empty where there is none: versions and machine have to do."""
    machine: str
    """GPU models with their driver, and the processor: C++ kernels are built for it."""
    versions: Mapping[str, str]
    model: str
    """SHA-256 of the model's config."""
    layout: Mapping[str, object]
    """Parallel sizes, dtype, engine: what changes shapes and kernels."""
    engine: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions in the engine's own environment; empty where it has none, or runs elsewhere."""
    compilers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Version of the CUDA toolkit, where there is one, and the variables that steer compilers."""
    archives: int = ARCHIVES

    @property
    def digest(self) -> str:
        """64 hex digits."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def key_of(
    model: Path,
    layout: Mapping[str, object],
    *,
    engine_python: str | None = None,
    cancelled: threading.Event | None = None,
) -> CacheKey:
    """The key on this machine, in this environment. Loads neither torch nor a driver.

    Args:
        model: HF folder; without a config in it the key is shared by nobody else's model either.
        layout: JSON values.
        engine_python: interpreter of the engine's environment, which is asked for its versions:
            most kernels are the engine's. None: it has none of its own, or runs elsewhere.
        cancelled: set from another thread: nobody is waited for any longer.

    Raises:
        OSError: if that interpreter cannot be run.
        subprocess.SubprocessError: if it fails, or does not answer in time or before ``cancelled``.
    """
    config = model / _MODEL_FILE
    content = config.read_bytes() if config.is_file() else str(model).encode()
    return CacheKey(
        image=read_variable("IMAGE", os.environ) or "",
        machine=_machine(),
        versions={name: found for name in _PACKAGES if (found := _version(name))}
        | {"python": platform.python_version()},
        model=hashlib.sha256(content).hexdigest(),
        layout=dict(layout),
        engine=_versions_of(engine_python, cancelled) if engine_python else {},
        compilers=_compilers(cancelled),
    )


def _machine() -> str:
    gpus = sorted(_field(path, "Model") for path in _GPUS.glob("*/information"))
    driver = Path("/proc/driver/nvidia/version")
    told = [*gpus, driver.read_text(errors="replace") if driver.is_file() else ""]
    cpu = ";".join(_field(_CPU, name) for name in _CPU_FIELDS)
    return "; ".join((*told, platform.machine(), hashlib.sha256(cpu.encode()).hexdigest()[:16]))


def _field(path: Path, name: str) -> str:
    """The first value of ``name : value`` in a file of the kernel; empty where there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() == name:
            return value.strip()
    return ""


def _versions_of(python: str, cancelled: threading.Event | None) -> dict[str, str]:
    within_s = stretched("readiness", _ASK_S)
    said = answer([python, "-c", _ASK, *_PACKAGES], within_s=within_s, cancelled=cancelled)
    return json.loads(said.splitlines()[-1])


def _compilers(cancelled: threading.Event | None) -> dict[str, str]:
    found = {name: value for name in _VARIABLES if (value := os.environ.get(name))}
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    # In the order in which torch and FlashInfer look for it.
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    nvcc = nvcc or str(_TOOLKIT / "bin" / "nvcc")
    with suppress(OSError, subprocess.CalledProcessError):  # none, or one that compiles nothing
        within_s = stretched("readiness", _ASK_S)
        found["nvcc"] = answer([nvcc, "--version"], within_s=within_s, cancelled=cancelled)
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
