"""Where the GPU stands idle within a call, and which kernels fill the rest.

A GPU that comes from a rest runs faster than one at its power limit, so calls are made one after
another and only the last ones are looked at: kernel times then belong to the wall time beside them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Event = dict[str, Any]

_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LONG_US = 150.0
"""A kernel as long as that is work of a layer, not of what comes before the first one."""
_GAP_US = 5.0


def timeline(
    action: Callable[[], object],
    group_of: Callable[[str], str],
    *,
    warm: int = 16,
    calls: int = 4,
) -> dict[str, Any]:
    """Profile the last ``calls`` of ``warm + calls`` calls, each from an idle GPU to an idle GPU.

    Returns:
        Medians over the calls, ms: ``wall`` (beside the profiler), ``head`` (call to first work on
        the GPU), ``until_long`` (call to the first long kernel), ``busy``, ``idle_inside`` (between
        first and last work; ``gaps_over_5us`` of it in ``num_gaps``), ``tail`` (last work to the
        end). ``kernels``: ms and count of one call. ``gaps``: the longest ones of the last call,
        with what ran before and after. Empty without a GPU.
    """
    if not torch.cuda.is_available():
        for _ in range(calls):
            action()
        return {}
    from torch.profiler import ProfilerActivity, profile, schedule

    walls: list[float] = []
    plan = schedule(wait=warm - 2, warmup=2, active=calls, repeat=1)
    clock = _ask_clock()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=plan,
            on_trace_ready=lambda p: p.export_chrome_trace(str(trace)),
        ) as seen:
            for _ in range(warm + calls):
                torch.cuda.synchronize()
                start = time.perf_counter()
                action()
                torch.cuda.synchronize()
                walls.append((time.perf_counter() - start) * 1e3)
                seen.step()
        events: list[Event] = json.loads(trace.read_text())["traceEvents"]
    found = read(events, group_of, calls=calls)
    found["wall"] = round(statistics.median(walls[-calls:]), 2)
    found["wall_before"] = round(statistics.median(walls[2 : warm - 2]), 2)
    found["clock"] = _answer(clock)
    return found


def read(events: list[Event], group_of: Callable[[str], str], *, calls: int) -> dict[str, Any]:
    """The figures of ``timeline`` out of the events of a trace."""
    work = sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda e: e["ts"])
    if not work:
        return {"error": "no work on the GPU was recorded"}
    syncs = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("name") == "cudaDeviceSynchronize" and "dur" in e
    )
    parts = [_one(part, syncs) for part in _by_call(work, calls)]
    keys = [k for k in parts[0] if all(isinstance(p.get(k), float) for p in parts)]
    groups: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in work:
        ms = float(event["dur"]) / 1e3
        groups[group_of(event["name"])] += ms / calls
        kernels[event["name"][:120]].append(ms)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        **{k: round(statistics.median([p[k] for p in parts]), 3) for k in keys},
        "groups_ms": {k: round(v, 2) for k, v in sorted(groups.items(), key=lambda g: -g[1])},
        "kernels": [(round(sum(ms) / calls, 3), len(ms) / calls, name) for name, ms in longest],
        "gaps": parts[-1]["gaps"],
    }


def _by_call(work: list[Event], calls: int) -> list[list[Event]]:
    """Divide at the longest rests: between two calls the host waits and begins anew."""
    rests = [(work[i + 1]["ts"] - work[i]["ts"] - work[i]["dur"], i) for i in range(len(work) - 1)]
    cuts = sorted(i + 1 for _, i in sorted(rests, reverse=True)[: calls - 1])
    ends = [*cuts, len(work)]
    return [work[a:b] for a, b in zip([0, *cuts], ends, strict=True)]


def _one(work: list[Event], syncs: list[tuple[float, float]]) -> dict[str, Any]:
    first = float(work[0]["ts"])
    end, busy = first, 0.0
    gaps: list[tuple[float, float, str, str]] = []
    before = ""
    for event in work:
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if start - end > _GAP_US:
            gaps.append((round(start - end, 1), round((start - first) / 1e3, 2), before[:60],
                         event["name"][:60]))  # fmt: skip
        busy += max(0.0, stop - max(start, end))
        if stop > end:
            end, before = stop, event["name"]
    long = next((float(e["ts"]) for e in work if float(e["dur"]) > _LONG_US), first)
    found: dict[str, Any] = {
        "busy": busy / 1e3,
        "idle_inside": (end - first - busy) / 1e3,
        "gaps_over_5us": sum(gap[0] for gap in gaps) / 1e3,
        "num_gaps": float(len(gaps)),
        "num_kernels": float(len(work)),
        "gaps": sorted(gaps, reverse=True)[:12],
    }
    # A call lies between the end of one wait for the device and the end of the next.
    began = [stop for _, stop in syncs if stop <= first]
    ended = [stop for start, stop in syncs if stop >= end and start >= first]
    if began:
        found["head"] = (first - max(began)) / 1e3
        found["until_long"] = (long - max(began)) / 1e3
    if ended:
        found["tail"] = (min(ended) - end) / 1e3
    return found


def _ask_clock() -> subprocess.Popen[str] | None:
    """Ask beside the calls how fast the GPU runs and what holds it back."""
    fields = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def _answer(asked: subprocess.Popen[str] | None) -> str:
    if asked is None:
        return ""
    try:
        return asked.communicate(timeout=20)[0].strip()
    except subprocess.TimeoutExpired:
        asked.kill()
        return ""
