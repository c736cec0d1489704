import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from runtime.clock import ManualClock
from runtime.telemetry.progress import RunProgress, describe

WORKFLOW = {
    "run": "letters",
    "state": "training",
    "activity": "running",
    "update": 57,
    "step": "segment/60",
    "expected": {"updates": 200},
    "detail": {"reward_mean": 0.4123, "tokens_per_s": 3100.2, "staleness_mean": 1.25},
    "failure": None,
}


def plain(clock: ManualClock) -> tuple[RunProgress, io.StringIO]:
    out = io.StringIO()
    return RunProgress(Console(file=out, force_terminal=False), clock=clock), out


def test_a_line_says_where_the_run_stands() -> None:
    line = describe(WORKFLOW)
    assert line == ("update 57/200 · reward 0.412 · 3,100 tokens/s · staleness 1.2 · segment/60")


def test_a_held_or_failed_run_says_so() -> None:
    failure = {"error_class": "PublicationFailed", "message": "no engine verified"}
    held = {**WORKFLOW, "activity": "held", "failure": failure}
    assert "held" in describe(held)
    assert "PublicationFailed: no engine verified" in describe(held)
    assert describe({**WORKFLOW, "state": "complete", "activity": None}).endswith("complete")


def test_a_log_gets_few_lines_and_every_change_of_state() -> None:
    clock = ManualClock()
    progress, out = plain(clock)
    with progress:
        for update in range(100):
            progress.show({**WORKFLOW, "update": update})
            clock.advance(0.5)
        progress.show({**WORKFLOW, "update": 100, "activity": "held"})
        progress.show({**WORKFLOW, "update": 100, "activity": "held"})
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 4 + 1  # at once, every 10 s, the change
    assert lines[-1].endswith("held")


def test_a_terminal_gets_a_bar_with_the_total() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, color_system=None)
    with RunProgress(console) as progress:
        progress.show(WORKFLOW)
    assert "letters" in out.getvalue()
    assert "update 57/200" in out.getvalue()


@given(
    st.dictionaries(
        st.sampled_from(["state", "activity", "update", "expected", "detail", "failure", "step"]),
        st.none() | st.integers() | st.text(max_size=5) | st.dictionaries(st.text(), st.text()),
    )
)
def test_any_view_can_be_shown(workflow: dict[str, object]) -> None:
    progress, _ = plain(ManualClock())
    progress.show(workflow)
