"""Structured logs: one JSON line per event in ``attempts/<n>/<role>.log``.

Event names come from ``Event``; data goes into keys, never into the name. The process binds who it
is once (run, attempt, epoch, role, rank); a step binds ``update`` and ``policy`` through
structlog's contextvars.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import ClassVar, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

from runtime.telemetry.masking import Masker

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class LogFile:
    """Appends whole lines to a file; drops and counts them when the disk does not take them."""

    def __init__(self, path: Path | None, *, echo: bool) -> None:
        self.path = path
        self.dropped = 0
        self._echo = echo
        self._lock = threading.Lock()
        self._fd = None if path is None else _open(path)

    def write_line(self, line: str) -> None:
        """Write one line; never raises."""
        data = (line + "\n").encode(errors="replace")
        with self._lock:
            if self._fd is not None:
                try:
                    # One write per line: lines of processes that share the file do not mix.
                    os.write(self._fd, data)
                except OSError:
                    self.dropped += 1
            if self._echo:
                try:
                    sys.stderr.write(line + "\n")
                except (OSError, ValueError):
                    self.dropped += 1

    # structlog calls the method named like the level on what the logger factory gives it.
    msg = debug = info = warning = error = critical = exception = log = write_line

    def close(self) -> None:
        """Close the file; later lines are dropped silently."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class _Process:
    """What this process bound once; read by every log call, whichever thread makes it."""

    fields: ClassVar[dict[str, object]] = {}
    file: ClassVar[LogFile] = LogFile(None, echo=True)
    masker: ClassVar[Masker] = Masker({})


def configure(
    path: Path | None,
    *,
    run: str,
    attempt: int,
    role: str,
    rank: int = 0,
    epoch: int | None = None,
    level: str = "info",
    echo: bool = False,
    capture_stdlib: bool = True,
) -> LogFile:
    """Send this process's events to ``path``. Calling again replaces the former target.

    Args:
        path: the log file, usually ``log_path(...)``; None with ``echo`` for a terminal only.
        run: name of the run.
        attempt: number of the attempt.
        role: what this process is: guard, session, trainer, engine, flow …
        rank: rank within the role.
        epoch: the ownership epoch; None until it is known, then ``bind(epoch=…)``.
        level: debug, info, warning or error; lines below it cost about a microsecond.
        echo: write to standard error as well.
        capture_stdlib: other libraries' warnings (stdlib logging) become events ``library.warned``.

    Returns:
        The file, whose ``dropped`` counts lines that the disk refused.
    """
    _Process.file.close()
    _Process.file = LogFile(path, echo=echo)
    _Process.masker = Masker()
    _Process.fields = {"run": run, "attempt": attempt, "role": role, "rank": rank}
    if epoch is not None:
        _Process.fields["epoch"] = epoch
    _install(level)
    if capture_stdlib:
        _capture_stdlib()
    return _Process.file


def bind(**fields: object) -> None:
    """Add to what every later line of this process says (``epoch``, ``flow_run_id``)."""
    _Process.fields = {**_Process.fields, **fields}


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of this process: ``get_logger().info(Event.X, key=value)``.

    Usable before ``configure``; warnings then go to standard error.
    """
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger())


def log_path(root: Path, attempt: int, role: str, rank: int = 0) -> Path:
    """``attempts/<n>/<role>.log``; ranks above 0 have files of their own."""
    name = f"{role}.log" if rank == 0 else f"{role}-{rank}.log"
    return root / "attempts" / str(attempt) / name


def mask(text: str) -> str:
    """``text`` without what this process knows to be, or takes for, a secret."""
    return _Process.masker.mask(text)


def _install(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_process_fields,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            _masked_json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=_current_file,
        # Loggers are made at import, before configure: caching would pin them to the first target.
        cache_logger_on_first_use=False,
    )


class _StdlibLines(logging.Handler):
    """Other libraries' records as events of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record; what its own formatting raises is part of the line."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError) as error:
            message = f"{record.msg} (unformattable: {error})"
        call = get_logger().error if record.levelno >= logging.ERROR else get_logger().warning
        call("library.warned", logger=record.name, message=message, exc_info=record.exc_info)


def _capture_stdlib() -> None:
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _StdlibLines)]:
        root.removeHandler(handler)
    root.addHandler(_StdlibLines(level=logging.WARNING))


_render = structlog.processors.JSONRenderer(default=str)


def _current_file(*_: object) -> LogFile:
    return _Process.file


def _add_process_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {**_Process.fields, **event}


def _masked_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    line = _render(logger, method, event)
    return _Process.masker.mask_line(line if isinstance(line, str) else line.decode())


def _open(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None


# Until a process says where its log is, warnings go to standard error: never to standard output,
# which belongs to a command's answer.
_install("warning")
