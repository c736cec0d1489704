"""Four versions of Milepost with a step of a protocol taken out, and the tests that must fail.

``python -m tests.faults.mutants`` says of each whether it was caught (``make mutants``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "runtime", "tests")


_END_OF_SEAL = """\
                detail={"write_s": round(self._clock.monotonic() - start, 3)},
            )
        )
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One protocol step taken out of a copy."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    """(file, what stands there once, what stands there instead)"""
    caught_by: tuple[str, ...]
    """Tests of which one must fail."""


MUTANTS = (
    Mutant(
        name="commit record before fsync",
        edits=(
            (
                "runtime/checkpoints/commit.py",
                "        files = seal([(name, folder / name) for name in sorted(names)], names)\n",
                (
                    "        from runtime.checkpoints.files import digest\n\n"
                    "        files = tuple(\n"
                    "            FileEntry(name=n, size=(folder / n).stat().st_size,\n"
                    "                      sha256=digest(folder / n))\n"
                    "            for n in sorted(names)\n"
                    "        )\n"
                ),
            ),
            (
                "runtime/checkpoints/commit.py",
                "        return self._append(\n            CommitRecord(",
                "        record = self._append(\n            CommitRecord(",
            ),
            (
                "runtime/checkpoints/commit.py",
                _END_OF_SEAL,
                (
                    f"{_END_OF_SEAL}"
                    "        seal([(name, final / name) for name in sorted(names)])\n"
                    "        return record\n"
                ),
            ),
        ),
        caught_by=(
            (
                "tests/runtime/checkpoints/test_commit.py::"
                "test_every_file_is_durable_before_the_record_that_names_it"
            ),
            (
                "tests/runtime/checkpoints/test_commit.py::"
                "test_kill_at_every_file_operation_leaves_the_newest_told_commit_restorable"
            ),
        ),
    ),
    Mutant(
        name="requeue without joining siblings",
        edits=(
            (
                "runtime/rollout/requests.py",
                (
                    "    async with anyio.create_task_group() as tasks:\n"
                    "        for index, call in enumerate(calls):\n"
                    "            tasks.start_soon(run, index, call, tasks.cancel_scope)\n"
                ),
                (
                    "    import asyncio\n\n"
                    "    scope = anyio.CancelScope()\n"
                    "    started = [asyncio.ensure_future(run(i, c, scope)) "
                    "for i, c in enumerate(calls)]\n"
                    "    while not failures and not all(task.done() for task in started):\n"
                    "        await asyncio.sleep(0)\n"
                ),
            ),
        ),
        caught_by=(
            (
                "tests/runtime/rollout/test_requests.py::"
                "test_a_failing_sibling_cancels_the_others_and_they_are_joined"
            ),
            "tests/faults/test_producer_cancelled.py",
        ),
    ),
    Mutant(
        name="check-then-write instead of exclusive append",
        edits=(
            (
                "runtime/rundir/atomic.py",
                '        point("link", path)\n        try:\n',
                (
                    "        if path.exists():\n            raise FileExistsError(path)\n"
                    '        point("link", path)\n        try:\n'
                ),
            ),
            (
                "runtime/rundir/atomic.py",
                "                os.link(temporary, path)\n",
                "                temporary.replace(path)\n",
            ),
        ),
        caught_by=(
            (
                "tests/runtime/rundir/test_chain.py::"
                "test_an_owner_that_is_overtaken_just_before_its_link_is_superseded"
            ),
        ),
    ),
    Mutant(
        name="bare update number instead of policy id",
        edits=(
            (
                "runtime/rundir/history.py",
                "    return all(\n        record.restored_update >= policy.update\n",
                (
                    "    return policy.update <= committed_update(records) or all(\n"
                    "        record.restored_update >= policy.update\n"
                ),
            ),
        ),
        caught_by=("tests/runtime/rundir/test_history.py",),
    ),
)


def make(mutant: Mutant, folder: Path, rooms: Sequence[str] = ROOMS) -> None:
    """Copy the rooms that matter into ``folder``, and take the step out."""
    folder.mkdir(exist_ok=True)
    for room in rooms:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, old, new in mutant.edits:
        file = folder / name
        text = file.read_text()
        assert text.count(old) == 1, f"{mutant.name}: {name} no longer holds {old!r} once"
        file.write_text(text.replace(old, new))


def is_caught(mutant: Mutant, folder: Path, *flags: str) -> tuple[bool, str]:
    """Whether a test fails in the copy, and what pytest says; ``-x`` for the first one alone."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *flags, "--no-header", "-p", "no:cacheprovider",
         *mutant.caught_by],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "HYPOTHESIS_PROFILE": "ci"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )  # fmt: skip
    # 1 is "tests failed"; anything else is a copy in which they could not even run.
    return done.returncode == 1 and "failed" in done.stdout, done.stdout[-3000:] + done.stderr


def main() -> int:
    """Make and judge every mutant; 0 if all are caught."""
    missed = 0
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory(prefix="mpmutant-") as folder:
            make(mutant, Path(folder))
            caught, said = is_caught(mutant, Path(folder))
        failed = [line for line in said.splitlines() if line.startswith("FAILED")]
        sys.stdout.write(f"{'caught' if caught else 'MISSED'}: {mutant.name}\n")
        sys.stdout.writelines(f"  {line[:200]}\n" for line in failed)
        if not caught:
            missed += 1
            sys.stdout.write(said)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
