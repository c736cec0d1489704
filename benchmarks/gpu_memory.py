"""Memory of all GPUs over time, as the driver tells it, and what sleeping engines give back."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

MIB = 2**20
EDGE_S = 0.05
"""Left out at both ends of a phase: samples and events come from different processes."""


class MemoryWatch:
    """Samples used memory in a thread, in MiB for each GPU; a context manager."""

    def __init__(self, every_s: float = 0.05) -> None:
        self.samples: list[tuple[float, list[int]]] = []
        """Wall time, and MiB by GPU."""
        self._every_s = every_s
        self._ask = _asker()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        """Begin; without a GPU there are no samples."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._is_over.set()
        self._thread.join(15.0)

    @property
    def peak(self) -> list[int]:
        """Most of each GPU."""
        return [max(column) for column in zip(*(used for _, used in self.samples), strict=True)]

    def _watch(self) -> None:
        while self._ask is not None and not self._is_over.wait(self._every_s):
            used = self._ask()
            if used:
                self.samples.append((time.time(), used))


def _asker() -> Callable[[], list[int]] | None:
    """NVML where its binding is there, since it takes a millisecond; else a program; else None."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # only beside GPUs

        nvml: Any = pynvml
        nvml.nvmlInit()
        cards = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # its errors need the binding that may not be there
        return _program if _program() else None
    return lambda: [nvml.nvmlDeviceGetMemoryInfo(card).used // MIB for card in cards]


def _program() -> list[int]:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in told.split()]


def sleep_figures(
    rows: Sequence[Mapping[str, Any]], samples: Sequence[tuple[float, Sequence[int]]]
) -> dict[str, Any] | None:
    """How long sleep and wake took, and what GPU 0 held meanwhile and between.

    Args:
        rows: of ``pipeline_lifecycle.jsonl``; one engine.
        samples: of ``MemoryWatch``.

    Returns:
        None when no engine slept. Times are those of all sleeps. Memory leaves the first one out:
        the trainer's own grows in the update it is made for.
    """
    told = [r for r in rows if r["event"] in ("engine.slept", "engine.woken")]
    slept = [r for r in told if r["event"] == "engine.slept"]
    woken = [r for r in told if r["event"] == "engine.woken"]
    if not slept:
        return None
    asleep, awake = [], []
    for before, after in pairwise(told[1:]):
        kind = asleep if before["event"] == "engine.slept" else awake
        from_s, to_s = before["time"] + EDGE_S, after["time"] - after["elapsed_s"] - EDGE_S
        kind += [used[0] for when, used in samples if from_s <= when <= to_s]
    return {
        "num": len(slept),
        "sleep_s": _spread([r["elapsed_s"] for r in slept]),
        "wake_s": _spread([r["elapsed_s"] for r in woken]),
        "asleep_mib": _spread(asleep),
        "awake_mib": _spread(awake),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    median = round(statistics.median(values), 4)
    return {"median": median, "least": min(values), "most": max(values), "num": len(values)}
