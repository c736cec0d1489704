"""`[session]` and `[health]`: retries within a session, and the monitor of its engines."""

from __future__ import annotations

from pydantic import Field

from configs.section import PositiveSeconds, Seconds, Section


class Session(Section):
    """What the session retries by itself before it holds a step."""

    retries: int = Field(default=3, ge=0)
    """Tries after the first failure of a step."""
    retry_backoff: Seconds = 5.0
    """Wait before the first retry; it doubles."""


class Health(Section):
    """The health monitor of serving engines. Off switches engine recovery off too."""

    enabled: bool = True
    """Probe engines and restart dead ones."""
    interval: PositiveSeconds = 10.0
    """Between rounds of probes of one engine; a round ends with its first answer."""
    timeout: PositiveSeconds = 10.0
    """Limit of one probe."""
    misses: int = Field(default=3, ge=1)
    """Probes missed in a row before an engine is dead: within `interval` x `misses` + 5 s of its
    hang, where `timeout` leaves room for it."""
    first_wait: Seconds = 0.0
    """Grace after a start and each resume; raise it for cold kernel compilation."""
    restarts_per_hour: int = Field(default=3, ge=0)
    """Restart budget of one engine slot."""
