"""Real programs of another environment: what they are given, and that nothing of them is left."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.interpreters import answer, environment_of_another


def test_our_environment_is_not_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A home without a library, and a module where we stand: an interpreter ends on either.
    (tmp_path / "json.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    asks = "import json, os, sys; print(os.getcwd(), '' in sys.path, os.environ['PYTHONPATH'])"
    assert answer([sys.executable, "-c", asks], within_s=60.0) == "/ False /theirs\n"
    env = environment_of_another(first=(Path("/first"), Path("/theirs")))
    assert env["PYTHONPATH"] == os.pathsep.join(("/first", "/theirs"))
    assert {"PYTHONHOME", "VIRTUAL_ENV"}.isdisjoint(env)


def test_a_program_that_fails_says_so() -> None:
    with pytest.raises(subprocess.CalledProcessError) as found:
        answer(["sh", "-c", "echo why >&2; exit 3"], within_s=60.0)
    assert (found.value.returncode, found.value.stderr) == (3, b"why\n")


@pytest.mark.parametrize("ends_by", ["limit", "cancellation"])
def test_one_that_hangs_is_left_with_what_it_started(ends_by: str, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    hangs = f"sleep 600 & echo $$ $! > {told}.new; mv {told}.new {told}; wait"
    cancelled = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answer(
                ["sh", "-c", hangs],
                within_s=0.5 if ends_by == "limit" else 600.0,
                cancelled=cancelled,
            )
        except BaseException as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    if ends_by == "cancellation":
        wait_for(told.exists)
        cancelled.set()
    asking.join()
    assert isinstance(errors[0], subprocess.SubprocessError)
    assert isinstance(errors[0], subprocess.TimeoutExpired) == (ends_by == "limit")
    pids = told.read_text().split() if told.exists() else []  # it may not have got that far
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.02)


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
