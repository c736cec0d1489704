"""Weights & Biases, online or offline, in a thread of its own.

Facts that shaped it (wandb 0.31): ``log`` after the death of its service raises into the caller; a
frozen service hangs ``finish`` whatever ``finish_timeout`` says; a full disk raises nothing;
``init`` without a server blocks until its timeout. So every call happens here, is caught here, and
a finish that takes too long ends the service process. Its step only counts rows; our axes stand in
every row.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import psutil

from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.protocol import Axis
from runtime.telemetry.rows import Owner

Mode = Literal["online", "offline", "disabled"]

MIN_FREE_BYTES = 32 * 2**20
"""Below this wandb may lose rows without an error; the loss is then said once."""
_DISK_CHECK_EVERY = 200
_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """What a run file says about tracking."""

    mode: Mode
    project: str
    name: str
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    init_timeout_s: float = 30.0
    finish_timeout_s: float = 30.0
    """How long the end of a run waits for uploads; the rest stays on disk for ``wandb sync``."""
    max_queued_rows: int = 10_000


@dataclass(slots=True, kw_only=True)
class _Row:
    axis: Axis
    step: float
    values: dict[str, float]
    count: int = 1
    """Rows of the caller in it."""

    def joins(self, other: _Row) -> bool:
        return self.step == other.step and self.values.keys().isdisjoint(other.values)


class WandbSink:
    """Hands rows to W&B. Any failure is logged once and stops nothing; dropped rows are counted."""

    def __init__(self, root: Path, settings: WandbSettings, owner: Owner) -> None:
        """Make the sink; nothing is imported, started or written yet.

        Args:
            root: output root; files go to ``wandb/`` below it.
            settings: mode, names and limits.
            owner: attempt and epoch, written into every row.
        """
        self._root = root
        self._settings = settings
        self._owner = owner
        self._queue: queue.Queue[_Row] = queue.Queue(settings.max_queued_rows)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb-sink", daemon=True)
        self._dead = settings.mode == "disabled"
        self._lock = threading.Lock()
        self._told = False
        self.sent = 0
        """Rows W&B took."""
        self.dropped = 0
        """Rows it did not get; all of them are in ``metrics.jsonl``."""
        self.run_id: str | None = None
        self.mode: Mode = settings.mode

    def start(self) -> None:
        """Open the W&B run in the background; returns at once. Once per sink."""
        if self._dead:
            return
        self.mode = resolve_mode(self._settings.mode, os.environ)
        if self.mode != self._settings.mode:
            _log.info(Event.TRACKING_FELL_BACK, reason="no API key", mode=self.mode)
        os.environ.update(environment(self._root, self.mode))
        # An inherited service belongs to another process, which may end first.
        os.environ.pop("WANDB_SERVICE", None)
        self._thread.start()

    def log(self, axis: Axis, step: float, values: Mapping[str, float | None]) -> None:
        """Queue one row; drops and counts it when tracking is dead or hopelessly behind."""
        if self._dead:
            self._count_dropped(1)
            return
        measured = {name: v for name, v in values.items() if v is not None}
        try:
            self._queue.put_nowait(_Row(axis=axis, step=step, values=measured))
        except queue.Full:
            self._count_dropped(1)
            self._tell(Event.TRACKING_FAILED, reason="the queue is full: rows are being dropped")

    def finish(self, timeout_s: float | None = None) -> None:
        """Close the W&B run, within the limit and a few seconds. Idempotent.

        Args:
            timeout_s: the limit where the caller has less time than ``finish_timeout_s``.
        """
        self._closing.set()
        if not self._thread.is_alive():
            return
        limit_s = self._settings.finish_timeout_s if timeout_s is None else timeout_s
        self._thread.join(limit_s)
        if not self._thread.is_alive():
            return
        self._dead = True
        _log.warning(
            Event.TRACKING_ABANDONED,
            waited_s=limit_s,
            num_queued=self._queue.qsize(),
            next_check=f"wandb sync {self._root / 'wandb'}",
        )
        _end_service()
        self._thread.join(5.0)
        self._save_state("abandoned")

    # The thread

    def _work(self) -> None:
        try:
            run = self._open()
            self._pump(run)
            run.finish()
        except Exception as error:  # whatever wandb raises, it must not end a run
            self._fail(error)
            return
        finally:
            _teardown()
        self._save_state("finished")
        _log.info(Event.TRACKING_ENDED, num_sent=self.sent, num_dropped=self.dropped)

    def _open(self) -> Any:
        self.run_id = self._load_run_id()
        try:
            run = self._init(self.mode)
        except (
            Exception
        ) as error:  # no server, no network, refused key: offline files can be synced
            if self.mode == "offline" or self._dead:
                raise
            self.mode = "offline"
            _log.warning(Event.TRACKING_FELL_BACK, reason=_short(error), mode=self.mode)
            # The service holds on to the id of the failed start: a new one is needed.
            _end_service()
            _teardown()
            run = self._init(self.mode)
        for axis in Axis:
            run.define_metric(axis.value)
            for group in axis.groups:
                run.define_metric(group, step_metric=axis.value)
        self._save_state("running")
        _log.info(Event.TRACKING_STARTED, mode=self.mode, run_id=self.run_id)
        return run

    def _init(self, mode: Mode) -> Any:
        import wandb

        os.environ["WANDB_MODE"] = mode
        wanted = self._settings
        settings = wandb.Settings(
            init_timeout=wanted.init_timeout_s,
            finish_timeout=max(1.0, wanted.finish_timeout_s - 2.0),
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=5.0,
        )
        return wandb.init(
            dir=str(self._root),
            mode=mode,
            project=wanted.project,
            entity=wanted.entity,
            group=wanted.group,
            name=wanted.name,
            tags=list(wanted.tags) or None,
            config=dict(wanted.config),
            id=self.run_id,
            resume="allow" if mode == "online" else None,
            settings=settings,
        )

    def _pump(self, run: Any) -> None:
        # A call costs far more than a key: rows of one step go out as one, as long as no key comes
        # twice. What waits goes out with the next step of its axis, or when nothing came for a bit.
        waiting: dict[Axis, _Row] = {}
        while True:
            try:
                row = self._queue.get(timeout=0.2)
            except queue.Empty:
                for late in waiting.values():
                    self._send(run, late)
                waiting.clear()
                if self._closing.is_set():
                    return
                continue
            before = waiting.get(row.axis)
            if before is not None and before.joins(row):
                before.values |= row.values
                before.count += 1
                continue
            waiting[row.axis] = row
            if before is not None:
                self._send(run, before)

    def _send(self, run: Any, row: _Row) -> None:
        owner = {"attempt": self._owner.attempt, "epoch": self._owner.epoch}
        run.log({**row.values, row.axis.value: row.step, **owner})
        if self.sent // _DISK_CHECK_EVERY != (self.sent + row.count) // _DISK_CHECK_EVERY:
            self._check_disk()
        self.sent += row.count

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self._root).free
        if free < MIN_FREE_BYTES:
            self._tell(Event.TRACKING_FAILED, reason="disk nearly full", free_bytes=free)

    def _fail(self, error: Exception) -> None:
        self._dead = True
        lost = self._queue.qsize()
        self._count_dropped(lost)
        self._tell(Event.TRACKING_FAILED, reason=_short(error), num_sent=self.sent, num_lost=lost)
        self._save_state("failed")
        _end_service()

    def _count_dropped(self, count: int) -> None:
        with self._lock:
            self.dropped += count

    def _tell(self, event: Event, **fields: object) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            _log.warning(event, **fields)

    # wandb/run.json: the id that a resumed run keeps

    @property
    def _state_path(self) -> Path:
        return self._root / "wandb" / "run.json"

    def _load_run_id(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._state_path.read_text())["run_id"]
            if isinstance(found, str) and found.isalnum():
                return found
        return secrets.token_hex(6)

    def _save_state(self, state: str) -> None:
        record = {
            "schema_version": 1,
            "run_id": self.run_id,
            "project": self._settings.project,
            "mode": self.mode,
            "state": state,
            "time": time.time(),
        }
        draft = self._state_path.with_suffix(f".{os.getpid()}.tmp")
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(record, indent=1) + "\n")
            draft.replace(self._state_path)
        except OSError as error:
            self._tell(Event.TRACKING_FAILED, reason=f"the run id could not be kept: {error}")


def environment(root: Path, mode: Mode) -> dict[str, str]:
    """Every variable wandb would otherwise guess; nothing is written outside the output root."""
    folder = root / "wandb"
    return {
        "WANDB_MODE": mode,
        "WANDB_DIR": str(root),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",
        # Crash reports go over the network, in offline mode too.
        "WANDB_ERROR_REPORTING": "false",
    }


def resolve_mode(wanted: Mode, env: Mapping[str, str]) -> Mode:
    """Online needs a key; without one it is offline, and nobody is asked."""
    if wanted != "online" or _has_key(env):
        return wanted
    return "offline"


def _has_key(env: Mapping[str, str]) -> bool:
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = Path(env.get("HOME") or "/nonexistent")
    named = env.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(path)).authenticators(host):
                return True
    return False


def _end_service() -> None:
    """End the wandb-core that this process started, frozen or not; no other one."""
    me = os.getpid()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(me).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if words and "wandb-core" in words[0] and str(me) in words:
                    child.kill()
                    child.wait(2.0)


def _teardown() -> None:
    """Close the connection and take back wandb's exit hook, which would print a trace or hang."""
    with contextlib.suppress(Exception):
        import wandb

        cast(Any, wandb).teardown()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
