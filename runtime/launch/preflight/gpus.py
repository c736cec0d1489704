"""The GPUs of a host, and which of them a mask leaves."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.errors import PreflightFailed

INVENTORY_DEADLINE_S = 15.0
_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "driver_version",
    "compute_cap",
    "mig.mode.current",
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
LIST = ("nvidia-smi", "-L")
_MIG = re.compile(
    r"^\s+MIG\s+(?P<profile>\S+)\s+Device\s+(?P<index>\d+):\s+\(UUID:\s+(?P<uuid>\S+)\)"
)
_GPU = re.compile(r"^GPU\s+(?P<index>\d+):.*\(UUID:\s+(?P<uuid>\S+)\)")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")
Ask = Callable[[Sequence[str], float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver lists it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    driver: str
    capability: tuple[int, int]
    is_split: bool = False
    """MIG is on: its slices are used, not itself."""
    slices: tuple[str, ...] = ()
    """UUIDs of its MIG devices."""

    @property
    def generation(self) -> str:
        """``ampere``, ``hopper``, ``blackwell``; ``other`` for any other one."""
        major = self.capability[0]
        if major >= 10:
            return "blackwell"
        return {8: "ampere", 9: "hopper"}.get(major, "other")


def ask_driver(argv: Sequence[str], deadline_s: float) -> str:
    """Run the driver's tool.

    Raises:
        PreflightFailed: if it is missing, late, or fails.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, check=False)
    except FileNotFoundError as error:
        raise PreflightFailed(f"{argv[0]} is not there: no driver on this host") from error
    except subprocess.TimeoutExpired as error:
        raise PreflightFailed(
            f"{argv[0]} did not answer within {deadline_s:g} s: the driver hangs"
        ) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise PreflightFailed(f"{argv[0]} failed: {said[0] if said else done.returncode}")
    return done.stdout


def inventory(ask: Ask = ask_driver) -> list[Gpu]:
    """Every GPU of the host by index, whatever the mask says.

    Raises:
        PreflightFailed: if the driver does not answer within 15 s, or what it says is garbled.
    """
    text = ask(QUERY, INVENTORY_DEADLINE_S)
    gpus = [_gpu(row) for row in csv.reader(io.StringIO(text)) if row]
    if not gpus:
        raise PreflightFailed("nvidia-smi lists no GPU")
    if [gpu.index for gpu in gpus] != list(range(len(gpus))):
        raise PreflightFailed(f"nvidia-smi lists GPUs {[g.index for g in gpus]}: one is missing")
    if any(gpu.is_split for gpu in gpus):
        slices = parse_list(ask(LIST, INVENTORY_DEADLINE_S))
        gpus = [_with_slices(gpu, slices.get(gpu.uuid, ())) for gpu in gpus]
    return gpus


def parse_list(text: str) -> dict[str, tuple[str, ...]]:
    """GPU UUID -> UUIDs of its MIG devices, from ``nvidia-smi -L``."""
    found: dict[str, tuple[str, ...]] = {}
    current = ""
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            current = gpu["uuid"]
            found[current] = ()
        elif (mig := _MIG.match(line)) and current:
            found[current] = (*found[current], mig["uuid"])
    return found


def visible(gpus: Sequence[Gpu], mask: str | None) -> list[str]:
    """UUIDs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    Args:
        gpus: of the host.
        mask: the variable's value. None: it is unset, all are visible. Empty or ``-1``: none.

    Raises:
        PreflightFailed: if it names a device that is not there, or one twice.
    """
    everything = [uuid for gpu in gpus for uuid in (gpu.slices if gpu.is_split else (gpu.uuid,))]
    if mask is None:
        return everything
    named: list[str] = []
    for part in (piece.strip() for piece in mask.split(",")):
        if part in ("", "-1"):
            break  # CUDA reads no further
        named.append(_named(part, gpus, everything))
    if len(set(named)) != len(named):
        raise PreflightFailed(f"CUDA_VISIBLE_DEVICES={mask} names one device twice")
    return named


def _named(part: str, gpus: Sequence[Gpu], everything: Sequence[str]) -> str:
    if part.isdecimal():
        index = int(part)
        if index >= len(everything):
            raise PreflightFailed(
                f"CUDA_VISIBLE_DEVICES names device {index}; there are {len(everything)}"
            )
        # On a split GPU a number counts its slices, as CUDA enumerates them.
        return everything[index]
    if _UUID.fullmatch(part) is None:
        raise PreflightFailed(f"CUDA_VISIBLE_DEVICES: {part!r} is no index and no UUID")
    fitting = [uuid for uuid in everything if uuid.startswith(part)]
    if len(fitting) != 1:
        whole = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(part)]
        why = "is split into slices; name one of them" if whole else "is not on this host"
        why = "could be several" if len(fitting) > 1 else why
        raise PreflightFailed(f"CUDA_VISIBLE_DEVICES: {part} {why}")
    return fitting[0]


def _gpu(row: Sequence[str]) -> Gpu:
    fields = [field.strip() for field in row]
    if len(fields) != len(_FIELDS):
        raise PreflightFailed(f"nvidia-smi answers what cannot be read: {', '.join(fields)[:200]}")
    index, uuid, name, memory, driver, capability, mig = fields
    major, _, minor = capability.partition(".")
    try:
        return Gpu(
            index=int(index),
            uuid=uuid,
            name=name,
            memory_bytes=int(memory) * 2**20,
            driver=driver,
            capability=(int(major), int(minor)),
            is_split=mig == "Enabled",
        )
    except ValueError as error:
        raise PreflightFailed(
            f"nvidia-smi answers what cannot be read: {', '.join(fields)[:200]}"
        ) from error


def _with_slices(gpu: Gpu, slices: tuple[str, ...]) -> Gpu:
    return Gpu(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        driver=gpu.driver,
        capability=gpu.capability,
        is_split=gpu.is_split,
        slices=slices,
    )
