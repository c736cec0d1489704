"""``NCCL_SOCKET_IFNAME`` by NCCL's own rules. Names only: it proves no connectivity."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import PreflightFailed

VARIABLE = "NCCL_SOCKET_IFNAME"
_FALLBACK = "ib"
_NEVER_ALONE = ("lo", "docker")
"""What NCCL takes only when nothing else is there and nothing was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What comes of the variable on this host."""

    value: str | None
    """The value to hand on; None: unset."""
    interfaces: tuple[str, ...]
    """Those that NCCL may use, in its order."""
    warning: str = ""


def matching(interfaces: Sequence[str], value: str) -> list[str]:
    """Interfaces that a value of the variable allows, in the host's order.

    A list of prefixes; ``=`` in front makes them exact names, ``^`` excludes instead of including,
    ``^=`` excludes exact names.
    """
    text, excludes, exact = value, False, False
    if text.startswith("^"):
        text, excludes = text[1:], True
    if text.startswith("="):
        text, exact = text[1:], True
    wanted = [part for part in text.split(",") if part]

    def named(interface: str) -> bool:
        if exact:
            return interface in wanted
        return any(interface.startswith(prefix) for prefix in wanted)

    return [each for each in interfaces if named(each) != excludes]


def choose(
    interfaces: Sequence[str], value: str | None, *, replicas: int, is_bridged: bool
) -> Chosen:
    """Settle the variable for this host.

    Args:
        interfaces: names of the host's interfaces that are up.
        value: of the variable; None or empty: unset, which is best on one node.
        replicas: nodes of the run.
        is_bridged: the job has a network of its own instead of the host's.

    Raises:
        PreflightFailed: if the value matches nothing; the only exception is ``ib`` on one bridged
            node, where it is removed with a warning.
    """
    if not value:
        usual = [each for each in interfaces if not each.startswith(_NEVER_ALONE)]
        return Chosen(value=None, interfaces=tuple(usual or interfaces))
    found = matching(interfaces, value)
    if found:
        return Chosen(value=value, interfaces=tuple(found))
    if value == _FALLBACK and replicas == 1 and is_bridged:
        return Chosen(
            value=None,
            interfaces=tuple(interfaces),
            warning=f"{VARIABLE}={value} matches nothing in a bridged network: removed",
        )
    raise PreflightFailed(
        f"{VARIABLE}={value} matches none of {', '.join(interfaces) or 'no interfaces'}; "
        "on one node leave it unset, on several name the interface they share"
    )


def up_interfaces() -> list[str]:
    """Names of this host's interfaces that are up, in the kernel's order."""
    import psutil

    return [name for name, stats in psutil.net_if_stats().items() if stats.isup]


def main() -> int:
    """Entry point ``network-preflight``: print what the variable comes to here."""
    import os

    try:
        chosen = choose(up_interfaces(), os.environ.get(VARIABLE), replicas=1, is_bridged=False)
    except PreflightFailed as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"{VARIABLE}={chosen.value or ''}: {', '.join(chosen.interfaces)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
