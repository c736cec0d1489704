"""The drill notices a protocol step that was taken out: one blow to each mutant of ``mutants``.

``python -m tests.faults.drilled`` (``make drill-mutants``): for each, the same small drill of the
tree as it is, which must hold everything, and of the mutated copy, which must end with 1 and name
the promise. Minutes; one drill at a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from runtime.drill.job import Variant
from tests.faults.mutants import MUTANTS, ROOT, make

ROOMS = ("configs", "runtime", "tasks", "blocks", "flows")
_LIMIT_S = 400.0
_LEAVING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """What is dealt to the tree and to its mutant alike."""

    card: str
    seed: int
    names: str
    """In the words of the problem that the mutant must be found out by."""
    kills: int = 1
    updates: int = 12
    variant: Variant = "ahead"

    @property
    def command(self) -> list[str]:
        """Its command line, but for the folder."""
        return [
            "drill", "--kills", str(self.kills), "--seed", str(self.seed),
            "--updates", str(self.updates), "--variant", self.variant, "--only", self.card,
        ]  # fmt: skip


DRILLS = {
    # The record stands when the files are torn: the next epoch finds them so.
    "commit record before fsync": Drill(
        card="torn write at commit.fsync", seed=5, names="found a damaged commit"
    ),
    # One of two requests never leaves; the other is with its engine by then.
    "requeue without joining siblings": Drill(
        card="drop at generation.request", seed=2, names="they were not joined"
    ),
    # Both flows look before either of them links.
    "check-then-write instead of exclusive append": Drill(
        card="two flows at attempt.link", seed=2, names="was claimed and started by 2 flows"
    ),
    # What the dead epoch evaluated has the number of an update that is committed by now.
    "bare update number instead of policy id": Drill(
        card="rewind", seed=2, names="was undone, and taken for it"
    ),
}


def drilled(tree: Path, drill: Drill, folder: Path) -> tuple[int, list[str]]:
    """Drill a tree; its exit status, and the lines it said. Past the limit it is interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *drill.command, "--folder", str(folder)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        # It ends the processes of its run on its way out.
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=_LEAVING_S)
        said += f"\nno end within {_LIMIT_S:.0f} s"
    return process.returncode, said.splitlines()


def judged(mutant: str, *, work: Path) -> bool:
    """Drill the tree and a mutant, and say how both ended; whether both ended as they should."""
    drill = DRILLS[mutant]
    began = time.monotonic()
    status, said = drilled(ROOT, drill, work / "tree")
    holds = status == 0
    caught, found = False, said[-5:]
    if holds:
        copy = work / "copy"
        make(next(m for m in MUTANTS if m.name == mutant), copy, rooms=ROOMS)
        status, said = drilled(copy, drill, work / "mutant")
        # The last lines: a problem each, after the story of the run.
        problems = [line for line in said if drill.names in line and " ended: " not in line]
        caught = status == 1 and bool(problems)
        found = problems[:1] if caught else said[-20:]
    word = "caught" if caught else "MISSED" if holds else "the tree itself does not hold"
    sys.stdout.write(f"{word}: {mutant}: {drill.card}, {time.monotonic() - began:.0f} s\n")
    sys.stdout.writelines(f"  {line[:200]}\n" for line in found)
    sys.stdout.flush()
    return caught


def main() -> int:
    """Judge every mutant; 0 if the tree holds and all of them are caught."""
    missed = 0
    for mutant in DRILLS:
        work = Path(tempfile.mkdtemp(prefix="mpmutant-"))
        if judged(mutant, work=work):
            shutil.rmtree(work, ignore_errors=True)
        else:
            missed += 1
            sys.stdout.write(f"  kept: {work}\n")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
