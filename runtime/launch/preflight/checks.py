"""The preflight, in its order; and the checks that need no table of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from configs.plan import Plan
from configs.run import RunSpec
from configs.runtime_lock import RuntimeLock, read_lock
from configs.settle import trainer_attention
from runtime.errors import PreflightFailed
from runtime.launch.beaker_document import needs_host_network
from runtime.launch.preflight import attention, network
from runtime.launch.preflight.gpus import Gpu, inventory, visible

_TORCH_DEADLINE_S = 180.0
_TORCH = (
    "import torch; torch.cuda.init(); n = torch.cuda.device_count(); "
    "[torch.ones(8, device=f'cuda:{i}').sum().item() for i in range(n)]; "
    "print(n, torch.version.cuda)"
)
_LEAST_FREE_BYTES = 2**30


def preflight(
    plan: Plan,
    *,
    environ: Mapping[str, str],
    root: Path,
    gpus: Callable[[], list[Gpu]] = inventory,
    interfaces: Callable[[], list[str]] = network.up_interfaces,
    torch: Callable[[Mapping[str, str]], int] | None = None,
    lock: RuntimeLock | None = None,
) -> dict[str, str | None]:
    """Look at this host; returns the variables that processes of the job get on it (``corrected``).

    Args:
        plan: of the run.
        environ: of the job.
        root: the output root, for space and ownership.
        gpus: lists the host's GPUs.
        interfaces: lists its interfaces.
        torch: initialises torch and counts its devices.
        lock: what must be installed; None reads this code's own.

    Raises:
        PreflightFailed: with the first thing that cannot work.
    """
    launch, said = plan.spec["launch"], list[str]()
    spec = RunSpec.model_validate_json(json.dumps(plan.spec))
    chosen = network.choose(
        interfaces(),
        environ.get(network.VARIABLE),
        replicas=plan.topology.replicas,
        is_bridged=launch["backend"] == "beaker" and not needs_host_network(spec),
    )
    if chosen.warning:
        said.append(chosen.warning)
    listed = gpus()
    seen = visible(listed, environ.get("CUDA_VISIBLE_DEVICES"))
    if len(seen) != plan.topology.gpus_per_replica:
        raise PreflightFailed(
            f"this host shows {len(seen)} GPUs, the plan divides {plan.topology.gpus_per_replica}"
        )
    ours = [g for g in listed if {g.uuid, *g.slices} & set(seen)]
    backend = attention.settle(ours, plan.attention)
    check_installed(lock or read_lock())
    settled = {network.VARIABLE: chosen.value} if environ.get(network.VARIABLE) else {}
    counted = (torch or count_with_torch)(corrected(environ, settled))
    if counted != len(seen):
        raise PreflightFailed(f"torch sees {counted} GPUs, the driver leaves {len(seen)}")
    check_space(root, _checkpoint_bytes(plan))
    names = ", ".join(sorted({gpu.name for gpu in ours}))
    said.append(f"{len(seen)} x {names}, driver {ours[0].driver}")
    said.append(f"attention: they run {backend}; {trainer_attention(spec, backend)}")
    said.append(f"interfaces {', '.join(chosen.interfaces)}")
    sys.stdout.write("".join(f"preflight: {line}\n" for line in said))
    return settled


def corrected(environ: Mapping[str, str], settled: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with variables set, or (None) taken out."""
    named: dict[str, str | None] = {**environ, **settled}
    return {name: value for name, value in named.items() if value is not None}


def check_installed(lock: RuntimeLock, version: Callable[[str], str | None] | None = None) -> None:
    """Compare what is installed with the lock.

    Raises:
        PreflightFailed: naming every package that differs.
    """
    version = version or _version
    found = {name: version(name) for name in lock.packages}
    wrong = [
        f"{name} {found[name] or 'is missing'} instead of {wanted}"
        for name, wanted in sorted(lock.packages.items())
        if found[name] != wanted and (found[name] or "").partition("+")[0] != wanted
    ]
    if wrong:
        raise PreflightFailed(f"the image is not what its lock says: {'; '.join(wrong)}")


def check_space(root: Path, needed_bytes: int) -> None:
    """The output root is ours to write, and has room for a commit.

    Raises:
        PreflightFailed: if it is another user's, or too full.
    """
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        owner = root.stat().st_uid
        raise PreflightFailed(
            f"{root} belongs to user {owner} and user {os.getuid()} cannot write there: "
            f"{error.strerror}"
        ) from error
    free = shutil.disk_usage(root).free
    if free < max(needed_bytes, _LEAST_FREE_BYTES):
        raise PreflightFailed(
            f"{root} has {free / 2**30:.1f} GiB free; a commit needs "
            f"{max(needed_bytes, _LEAST_FREE_BYTES) / 2**30:.1f} GiB"
        )


def count_with_torch(environ: Mapping[str, str]) -> int:
    """Let torch initialise every device in a process of its own: CUDA stays out of this one.

    Raises:
        PreflightFailed: with torch's own last line, if torch, CUDA and driver do not fit.
    """
    argv: Sequence[str] = (sys.executable, "-c", _TORCH)
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_TORCH_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PreflightFailed(f"torch did not start within {_TORCH_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise PreflightFailed(f"torch does not start here: {said[-1] if said else done.returncode}")
    return int(done.stdout.split()[0])


def _checkpoint_bytes(plan: Plan) -> int:
    return plan.memory.staged_bytes_per_node * plan.topology.replicas if plan.memory else 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
