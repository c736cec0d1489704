"""What a campaign says at its end: one JSON object with the agreed names, and a table."""

import json

from runtime.drill.campaign import Outcome, Taken
from runtime.drill.catalogue import Blow
from runtime.drill.checks import Verdict
from runtime.drill.report import as_object, table

GUARD = Blow(name="kill guard", how="signal", role="guard", ends_epoch=True)
SLOW = Blow(name="slow", how="point", point="session.train")


def taken(blow: Blow, run: int, detected: float | None, recovered: float) -> Taken:
    return Taken(
        blow=blow, run=run, fired_at=0.0, detected_s=detected, decided_s=detected,
        recovered_s=recovered,
    )  # fmt: skip


def outcome() -> Outcome:
    well = Verdict(lost=0, doubled=0, orphans=0, problems=())
    broken = Verdict(lost=1, doubled=2, orphans=3, problems=("1 prompts are lost",))
    return Outcome(
        seed=4,
        taken=[
            taken(GUARD, 1, 0.5, 9.0),
            taken(SLOW, 1, None, 1.0),
            taken(GUARD, 2, 1.5, 11.0),
        ],
        verdicts={0: well, 1: well, 2: broken},
        updates_redone=7,
    )


def test_the_object_has_the_agreed_names_and_counts_every_run() -> None:
    said = json.loads(json.dumps(as_object(outcome())))
    assert {k: said[k] for k in ("kills", "fired", "lost", "doubled", "orphans")} == {
        "kills": 3, "fired": 3, "lost": 1, "doubled": 2, "orphans": 3,
    }  # fmt: skip
    assert (said["updates_redone"], said["runs"], said["seed"]) == (7, 2, 4)
    assert said["problems"] == ["run 2: 1 prompts are lost"]
    assert said["faults"][0] == {
        "fault": "kill guard", "fired": 2, "detected_s": 1.0, "decided_s": 1.0,
        "recovered_s": 10.0, "lost": 1, "doubled": 2,
    }  # fmt: skip


def test_the_table_shows_a_row_for_each_fault() -> None:
    head, _, guard, slow = table(outcome())
    assert head.split(" | ")[1:] == [
        "times fired", "detected after", "decided after", "recovered after", "prompts lost",
        "doubled |",
    ]  # fmt: skip
    assert guard == "| kill guard | 2 | 1.0 s | 1.0 s | 10.0 s | 1 | 2 |"
    assert slow == "| slow | 1 | - | - | 1.0 s | 0 | 0 |"
