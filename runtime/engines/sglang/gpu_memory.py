"""Whether processes that were ended still hold memory of a GPU."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Set

_POLL_S = 0.2
_ASK_S = 10.0


def freed(pids: Set[int], *, within_s: float = 10.0) -> bool:
    """Wait until no GPU of this host lists one of these processes.

    True at once where there is no NVIDIA driver. Inside a container the driver may number
    processes otherwise: it then lists none of ours, and that their group is gone is all there is.

    Args:
        pids: processes that have ended.
        within_s: how long the driver may take to clear up.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return True
    deadline = time.monotonic() + within_s
    while holders(tool) & pids:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def holders(tool: str) -> set[int]:
    """Processes that hold a context on a GPU; empty when the driver does not answer."""
    command = [tool, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {int(word) for word in done.stdout.decode().split() if word.isdigit()}
