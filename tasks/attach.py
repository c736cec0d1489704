"""The first task: start the run, attach to its live attempt, or find it complete."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from prefect import task
from prefect.logging import get_run_logger

from configs.load import load_frozen, load_run
from configs.plan import make_plan
from runtime.errors import StoreError
from runtime.launch.attempts import Launch
from runtime.launch.start import start_run
from runtime.rundir.chain import Chain
from runtime.rundir.control import Control
from runtime.rundir.history import committed_update
from runtime.rundir.layout import RunRoot
from tasks.handle import RunHandle

_EVERY_S = 5.0


@task(name="attach")
def attach(run_file: Path, sets: list[str], attempt: int | None = None) -> RunHandle:
    """Load the run file and make sure that somebody works on it. Idempotent.

    Args:
        run_file: TOML, or the frozen one of an attempt, which then is the attempt.
        sets: replacements in a TOML file.
        attempt: one that was started already. Whoever started it may have seen it end since then,
            stopped or failed: nothing is started over that. None: whatever is to be done is done.

    Raises:
        RunFileError: if the file has problems; all of them are in the message.
        ConfigError: if the output root belongs to another training.
    """
    # The frozen run file of an attempt is JSON: whoever attaches beside a guard gives that one.
    is_beside = run_file.suffix == ".json"
    loaded = load_frozen(run_file) if is_beside else load_run(run_file, sets)
    if is_beside:
        attempt = int(run_file.absolute().parent.name)
    root = RunRoot.of(loaded.spec.output.root)
    seen_from = max(0, committed_update(Chain(root).read()))
    launch = start_run(loaded) if attempt is None else Launch(how="attached", attempt=attempt)
    message = launch.notice or f"attempt {launch.attempt} in {loaded.spec.output.root}"
    get_run_logger().info("%s: %s", launch.how, message)
    return RunHandle(
        loaded=loaded, plan=make_plan(loaded), attempt=launch.attempt, seen_from=seen_from
    )


@contextmanager
def staying_attached(run: RunHandle) -> Generator[None]:
    """Count as attached for as long as this process lives, whatever its calls of Prefect wait for.

    Otherwise a server that is away for longer than ``launch.detach_grace`` would park the run.
    """
    control, is_over = Control(run.root), threading.Event()

    def renew() -> None:
        while not is_over.wait(_EVERY_S):
            try:
                control.attach()
            except (OSError, StoreError):
                continue  # a full disk, or one that is away for a moment; the tasks will say so

    thread = threading.Thread(target=renew, name="attached", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
