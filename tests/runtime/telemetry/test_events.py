import ast
import re
from pathlib import Path

import pytest

from runtime import errors
from runtime.telemetry import reference
from runtime.telemetry.events import Event

ROOT = Path(__file__).parents[3]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def test_operations_page_shows_every_event_and_error_as_they_are() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert reference.rewritten(page) == page, (
        "run: python -m runtime.telemetry.reference docs/operations.md"
    )


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="events: generated"):
        reference.rewritten("# Operations\n")


def test_names_follow_the_pattern_and_are_unique() -> None:
    assert len({event.value for event in Event}) == len(list(Event.__members__))
    for event in Event:
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", event), event
        assert event.sentence.endswith("."), event


def test_every_span_has_a_beginning_and_an_end() -> None:
    names = {event.value for event in Event}
    for name in names:
        if name.endswith((".stage_started", ".started")):
            noun = name.removesuffix("started")
            ends = {"finished", "failed", "committed", "ended", "completed", "exited"}
            if noun not in {"trainer.", "engine.", "session.", "attempt.", "run."}:
                assert names & {noun + end for end in ends}, name


def test_every_event_is_recorded_somewhere() -> None:
    own = ROOT / "runtime" / "telemetry" / "events.py"
    rooms = [
        path.read_text()
        for room in ("runtime", "tasks", "flows", "blocks")
        for path in (ROOT / room).rglob("*.py")
        if path != own
    ]
    words = set(re.findall(r"\bEvent\.([A-Z_]+)|\"([a-z_]+\.[a-z_]+)\"", "\n".join(rooms)))
    used = {word for pair in words for word in pair}
    silent = [event.name for event in Event if not used & {event.name, event.value}]
    assert not silent, "an operator reads of events that never come"


def test_every_error_stands_in_the_table() -> None:
    table = reference.error_table()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.RunError) and value.__subclasses__:
            assert name == "RunError" or f"`{name}`" in table


def logged_names() -> list[tuple[str, str]]:
    """(file:line, event) of every log call with a literal name in the rooms."""
    found: list[tuple[str, str]] = []
    for room in ("runtime", "tasks", "flows", "blocks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                target = node.func.value
                name = getattr(target, "id", getattr(target, "attr", ""))
                if node.func.attr not in LEVELS or name not in {"_log", "log", "logger"}:
                    continue
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", first.value))
    return found


def test_every_event_that_is_logged_is_listed() -> None:
    known = {event.value for event in Event}
    strangers = [(where, name) for where, name in logged_names() if name not in known]
    assert not strangers, "add them to runtime.telemetry.events"
