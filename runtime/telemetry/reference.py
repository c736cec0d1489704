"""The operator's reference, generated: events and errors in ``docs/operations.md``.

``python -m runtime.telemetry.reference docs/operations.md`` rewrites what stands between the
markers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import RunError
from runtime.telemetry.events import Event


def event_table() -> str:
    """Every event with its sentence, in the order of the enum."""
    rows = [f"| `{event.value}` | {_cell(event.sentence)} |" for event in Event]
    return "\n".join(["| event | what it says |", "|---|---|", *rows])


def error_table() -> str:
    """Every error class: who may try again, and the next look."""
    rows = [
        f"| `{cls.__name__}` | {cls.retry.value} | {_cell((cls.__doc__ or '').splitlines()[0])} "
        f"| {_cell(cls.next_check)} |"
        for cls in _classes(RunError)
    ]
    return "\n".join(
        ["| error | tried again by | what happened | look next |", "|---|---|---|---|", *rows]
    )


def rewritten(text: str) -> str:
    """``text`` with both tables as they are now.

    Raises:
        ValueError: if a marker is missing.
    """
    for name, table in (("events", event_table()), ("errors", error_table())):
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"markers {begin!r} and {end!r} are missing")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def _classes(base: type[RunError]) -> Iterator[type[RunError]]:
    for cls in base.__subclasses__():
        if cls.__module__ == "runtime.errors":
            yield cls
            yield from _classes(cls)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: list[str]) -> int:
    """Rewrite the file named."""
    path = Path(argv[0])
    path.write_text(rewritten(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
