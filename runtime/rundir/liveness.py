"""Whether somebody is still there, judged on two looks and by the looker's own clock."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class Mark:
    """What a look at a file that somebody refreshes shows."""

    identity: tuple[int, int]
    """Device and inode: another file under the same name differs."""
    touched: int
    """Modification time in ns; only ever compared for equality."""
    size: int

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """Look at ``path``; None where there is nothing."""
        try:
            stat = os.lstat(path)
        except FileNotFoundError:
            return None
        return cls((stat.st_dev, stat.st_ino), stat.st_mtime_ns, stat.st_size)


class Watch:
    """Tells when a stamp has stood still for too long.

    No clock of another host enters, only whether the stamp differs between two looks. A looker
    that was frozen itself (SIGSTOP, suspend) finds the limit passed on its first look after waking,
    which proves nothing; a second look, ``again_s`` later, decides.
    """

    def __init__(
        self, clock: Clock, *, limit_s: float, again_s: float, is_own: bool = False
    ) -> None:
        """Start watching.

        Args:
            clock: the looker's own.
            limit_s: a stamp older than this has lapsed.
            again_s: least time between the two looks that decide.
            is_own: the stamp is refreshed by ourselves, so that doubt must make it older: a
                change seen now counts from the look before, otherwise from this look.
        """
        self._clock = clock
        self._limit_s = limit_s
        self._again_s = again_s
        self._is_own = is_own
        self._stamp: object = None
        self._looked_at: float | None = None
        self._changed_at = 0.0
        self._suspect_since: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds for which the stamp is known to stand still; 0 before the first look."""
        return 0.0 if self._looked_at is None else self._clock.monotonic() - self._changed_at

    @property
    def is_suspect(self) -> bool:
        """One look found the limit passed; the next decides."""
        return self._suspect_since is not None

    def has_lapsed(self, stamp: object) -> bool:
        """Look: True once two looks, ``again_s`` apart, found the stamp older than the limit."""
        now = self._clock.monotonic()
        if self._looked_at is None or stamp != self._stamp:
            before = now if self._looked_at is None else self._looked_at
            self._changed_at = before if self._is_own else now
            self._stamp = stamp
            self._suspect_since = None
        self._looked_at = now
        if now - self._changed_at <= self._limit_s:
            return False
        if self._suspect_since is None:
            self._suspect_since = now
        return now - self._suspect_since >= self._again_s
