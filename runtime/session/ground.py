"""What stands before any process of a session is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anyio.abc import TaskGroup

from runtime.session.caching import SessionCaches
from runtime.session.context import Context
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from runtime.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What stands before any process is started."""

    context: Context
    scratch: Path
    """Short folder on local disk for Ray's sockets and logs."""
    recorder: Recorder
    view: SessionView
    signals: Signals
    tasks: TaskGroup
    """Of the whole session: whatever fails in it ends the session."""
    caches: SessionCaches | None = None
    """None where no archive of compiler caches is kept."""
