"""One blow at an engine of a running run, and what became of it: for ``gpu_run``.

``kill``: SIGKILL of the process that holds the weights. ``stop``: SIGSTOP of it, a hang.
``broadcast``: SIGKILL while a publication's bucket is held back and all engines wait for it inside
the collective; it is sent then, to a group with a dead member.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.gpu_processes import Processes
from runtime.faults.plan import VARIABLE, Fault, FaultPlan, Kind
from runtime.publication.decision import Decision

ENTER_S = 1.0
"""For engines to enter the collective of a bucket that is held back."""
HELD_S = 60.0
TRIES = 3
"""Of blows that found no server to strike."""
GOES_ON = 3
"""Publications after the return that show it."""
_DIED, _VERIFIED = "engine.died", "engine.verified"
_LATER = ("engine.restarted", "engine.retired")


@dataclass(slots=True, kw_only=True)
class Strike:
    """Falls once, after update ``at``; ``look`` is called every now and then."""

    kind: Literal["kill", "stop", "broadcast"]
    at: int
    processes: Processes
    """Of the run."""
    fallen: dict[str, Any] | None = None
    _plan: FaultPlan | None = field(default=None, init=False)
    _is_armed: bool = field(default=False, init=False)
    _missed: int = field(default=0, init=False)

    def prepare(self, folder: Path) -> None:
        """Before the run starts: its processes learn where plans of faults lie."""
        os.environ.pop(VARIABLE, None)
        if self.kind == "broadcast":
            self._plan = FaultPlan(folder)
            os.environ[VARIABLE] = str(folder)

    def look(self, update: int) -> None:
        """Strike if it is time."""
        if self.fallen is not None or update < self.at or self._missed >= TRIES:
            return
        if self._plan is None:
            self._fall(update, signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        elif not self._is_armed:
            self._is_armed = True
            # An id of its own for every try: one that fired says nothing of the next bucket.
            held = Fault(id=self._id, point="publication.bucket", kind=Kind.HOLD, seconds=HELD_S)
            self._plan.arm([held])
        elif self._plan.fired(self._id):
            time.sleep(ENTER_S)
            self._fall(update, signal.SIGKILL)
            self._plan.arm([])  # the bucket is sent
            if self.fallen is None:
                self._missed += 1
                self._is_armed = False

    @property
    def _id(self) -> str:
        return f"broadcast-{self._missed}"

    def _fall(self, update: int, number: signal.Signals) -> None:
        victim = self.processes.newest_server()
        if victim is None:
            return
        try:
            victim.send_signal(number)
        except psutil.NoSuchProcess:  # it has ended by itself: no blow
            return
        self.fallen = {"kind": self.kind, "update": update, "pid": victim.pid, "at": time.time()}

    def figures(
        self, rows: Sequence[Mapping[str, Any]], decisions: Sequence[Decision]
    ) -> dict[str, Any]:
        """What came of it so far, in seconds after the blow.

        Args:
            rows: of ``pipeline_lifecycle.jsonl``.
            decisions: of ``publications.jsonl``.
        """
        if self.fallen is None:
            told = {"kind": self.kind, "armed": self._is_armed, "missed": self._missed}
            return {**told, "fallen": False}
        at = self.fallen["at"]
        slots = _stories([row for row in rows if row["time"] >= at], at)
        later = [d for d in decisions if _ended(d) >= at]
        return {
            **self.fallen,
            "slots": slots,
            "died": len(slots),
            "verified_again": sum(story[-1]["event"] == _VERIFIED for story in slots.values()),
            "is_back": _is_back(slots, [_ended(d) - at for d in later]),
            "publications": [_short(d, at) for d in later[:6]],
            "publications_after": len(later),
        }


def _stories(rows: Sequence[Mapping[str, Any]], at: float) -> dict[str, list[dict[str, Any]]]:
    """By slot, of those that died: each death and restart, and the first proof after the last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        slot, event = str(row.get("slot")), row["event"]
        story = found.get(slot, [])
        is_next = (
            event == _DIED
            or (event in _LATER and bool(story) and story[-1]["event"] == _DIED)
            or (event == _VERIFIED and bool(story) and story[-1]["event"] == "engine.restarted")
        )
        if is_next:
            told = {"event": event, "after_s": round(row["time"] - at, 2)}
            if row.get("reason"):
                told["reason"] = str(row["reason"])[:300]
            found[slot] = [*story, told]
    return found


def _is_back(slots: dict[str, list[dict[str, Any]]], publications: Sequence[float]) -> bool:
    """All that died are verified again, and the run went on with them."""
    last = [story[-1] for story in slots.values()]
    if not last or any(told["event"] != _VERIFIED for told in last):
        return False
    return sum(ended > max(t["after_s"] for t in last) for ended in publications) > GOES_ON


def _ended(decision: Decision) -> float:
    return decision.started_at + sum(decision.stages_s.values())


def _short(decision: Decision, at: float) -> dict[str, Any]:
    return {
        "kind": decision.kind,
        "policy": decision.policy,
        "outcome": decision.outcome,
        "ended_after_s": round(_ended(decision) - at, 2),
        "verified": sorted(v.slot for v in decision.verified),
        "failed": [(f.slot, f.stage, f.kind, f.killed) for f in decision.failed],
    }
