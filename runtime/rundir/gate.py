"""A gate between a launcher and the guard it starts: nothing is begun that is not written down.

A launcher may be gone between starting a process and writing down which one it is. Whoever asks
next would find an attempt that nobody works on, and start another beside the first. So the guard
waits on its standard input; it is let go once the record of it stands, and leaves when its launcher
is gone before that.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

GATED = "--gated"
"""Last argument of a process that waits at a gate."""
_GO = b"1"


def open_gate(process: subprocess.Popen[bytes]) -> None:
    """Let a process go that was started with ``stdin=PIPE``; one that is gone already stays so."""
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(_GO)


def was_let_go() -> bool:
    """Wait for the launcher; False where it is gone and never let this process go.

    Standard input is empty from then on.
    """
    is_open = os.read(0, 1) == _GO
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return is_open
