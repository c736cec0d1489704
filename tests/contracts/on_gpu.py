"""The real server's tests on one CUDA GPU, several servers side by side, within a limit of time.

    python -m tests.contracts.on_gpu --python /opt/sglang/bin/python --out found

A start of a server is most of what a test costs, and a GPU machine has cores enough for five of
them: each group is a pytest of its own. The interpreter that runs this needs torch, transformers,
pytest with pytest-timeout and anyio, and what ``runtime.engines`` imports; no Prefect and no Ray.
A group that is not done in time is interrupted: what it had found is told all the same.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWNER = "tests/runtime/engines/test_sglang_owner.py"
ENGINE = "tests/contracts/test_engine_{}.py"
CONTRACT = [
    ENGINE.format(what) for what in ("answers", "refusals", "pauses", "weights", "weights_sent")
]
LIMITED = ENGINE.format("limits")

DEATHS = "refused_before_it_leaves or killed_scheduler"
LIMITS = "full_queue or queue_is_full or queue_holds or waiting_too_long"
MORE_LIMITS = (
    "running_too_long or abort_of_a_waiting or frees_its_place or abort_all_ends "
    "or waits_for_a_swap"
)
GROUPS: dict[str, list[str]] = {
    # Requests that would end it, kill -9 of its scheduler, a scheduler that hangs: three starts.
    "deaths": [OWNER, "-k", DEATHS],
    # Everything that an ordinary server can be asked: one start.
    "contract": [*CONTRACT, LIMITED, "-k", f"not ({LIMITS} or {MORE_LIMITS})"],
    # Servers with limits of their own: three and four starts.
    "limits": [LIMITED, "-k", LIMITS],
    "more-limits": [LIMITED, ENGINE.format("pauses"), "-k", MORE_LIMITS],
    # Starts that fail, and an owner that is killed.
    "starts": [OWNER, "-k", f"not ({DEATHS})"],
}
GRACE_S = 15.0
_LINE = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)


def start(name: str, out: Path, python: str) -> subprocess.Popen[bytes]:
    """One group; its words go to ``<name>.log``, its results to ``<name>.xml``."""
    command = [sys.executable, "-m", "pytest", "-m", "sglang", *GROUPS[name], "-v", "--tb=short"]
    # Warnings there are of packages that nobody pinned.
    command += ["-W", "default", "-p", "no:cacheprovider", "--junitxml", str(out / f"{name}.xml")]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "MILEPOST_SGLANG_PYTHON": python,
        "MILEPOST_SGLANG_DEVICE": os.environ.get("MILEPOST_SGLANG_DEVICE", "cuda"),
        "MILEPOST_REQUIRE_SGLANG": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=env,
            start_new_session=True,
        )  # fmt: skip


@contextmanager
def ending(processes: dict[str, subprocess.Popen[bytes]]) -> Generator[None]:
    """None of them outlives this, whichever way it is left."""
    try:
        yield
    finally:
        end(list(processes.values()))


def wait(processes: dict[str, subprocess.Popen[bytes]], deadline: float) -> dict[str, str]:
    """How each ended, if it did in time."""
    ended: dict[str, str] = {}
    for name, process in processes.items():
        try:
            ended[name] = f"exit {process.wait(max(0.0, deadline - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            ended[name] = "out of time"
    return ended


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt them: each writes what it has and ends its servers. Kill what stays."""
    running = [process for process in processes if process.poll() is None]
    gone_by = time.monotonic() + GRACE_S
    try:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, gone_by - time.monotonic()))
    finally:  # at once, for who does not want to wait for that either
        for process in running:
            if process.poll() is None:
                # Its servers hold one end of a pipe to it, and end with it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def summary(names: list[str], out: Path, ended: dict[str, str]) -> list[str]:
    """A line a test, and one a group."""
    lines: list[str] = []
    for name in names:
        found = _LINE.findall((out / f"{name}.log").read_text(errors="replace"))
        lines += [f"{name:12} {result:8} {test}" for test, result in found]
        counts = {r: sum(result == r for _, result in found) for r in ("PASSED", "FAILED", "ERROR")}
        lines.append(f"{name:12} == {ended[name]}: {counts}")
    return lines


def main() -> int:
    """Run the groups; 0 when all passed in time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter of SGLang's environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200.0, help="limit of all groups")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between two groups")
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    names: list[str] = arguments.groups.split(",")
    processes: dict[str, subprocess.Popen[bytes]] = {}
    # Whoever ends this from outside ends it like a Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ending(processes):
        for name in names:
            processes[name] = start(name, out, arguments.python)
            time.sleep(arguments.stagger)
        sys.stdout.write(f"{len(names)} groups run; what they say is in {out}\n")
        sys.stdout.flush()
        ended = wait(processes, began + arguments.seconds)
    lines = [*summary(names, out, ended), f"{time.monotonic() - began:.0f} s"]
    (out / "summary.txt").write_text("\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")  # what the command is for
    return 0 if all(how == "exit 0" for how in ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
