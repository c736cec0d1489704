import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runtime.analysis.runfiles import History, Point, RunFiles, mark, read_rows

epochs = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=5)
"""Per epoch: how far below the last update it restores, and how many updates it makes."""


def replay(plan: list[tuple[int, int]]) -> tuple[list[Point], dict[float, int], History]:
    """Rows as a run writes them, what a plain model says counts, and the chain's history."""
    points: list[Point] = []
    current: dict[float, int] = {}
    first_update: dict[int, int] = {}
    last = 0
    for epoch, (back, count) in enumerate(plan, start=1):
        restored = max(0, last - back)
        first_update[epoch] = restored + 1
        current = {u: e for u, e in current.items() if u <= restored}
        for update in range(restored + 1, restored + count + 1):
            points.append(
                Point(step=update, epoch=epoch, attempt=1, time=0.0, values={"x": float(epoch)})
            )
            current[update] = epoch
        last = restored + count
    return points, current, History(first_update)


@given(epochs)
def test_the_rows_of_committed_history_are_current_and_no_others(
    plan: list[tuple[int, int]],
) -> None:
    points, current, chain = replay(plan)
    for history in (chain, History.of_rows((p.epoch, p.step) for p in points)):
        marked = mark(points, history)
        assert {p.step: p.epoch for p in marked if not p.is_superseded} == current
        assert len(marked) == len(points)


@given(epochs, st.integers(0, 12))
def test_an_epoch_without_rows_yet_supersedes_the_tail_through_the_chain(
    plan: list[tuple[int, int]], restored: int
) -> None:
    points, current, chain = replay(plan)
    later = History({**chain.first_update, len(plan) + 1: restored + 1})
    kept = {p.step: p.epoch for p in mark(points, later) if not p.is_superseded}
    assert kept == {u: e for u, e in current.items() if u <= restored}


def test_of_equal_rows_the_last_counts_and_other_keys_stay() -> None:
    def point(values: dict[str, float]) -> Point:
        return Point(step=3, epoch=1, attempt=1, time=0.0, values=values)

    rows = [point({"a": 1.0}), point({"b": 5.0}), point({"a": 2.0})]
    assert [p.values for p in mark(rows, History())] == [{"b": 5.0}, {"a": 2.0}]


def test_damage_is_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    good = json.dumps({"schema_version": 1, "x": 1})
    newer = json.dumps({"schema_version": 99, "x": 1})
    dropped = json.dumps({"schema_version": 1, "x": 2, "dropped_before": 4})
    path.write_text("\n".join([good, '{"schema_ver', "", "[1]", newer, dropped]) + "\n")
    found = read_rows(path, "m.jsonl")
    assert [row["x"] for row in found.rows] == [1, 2]
    assert found.num_dropped == 4
    problems = " ".join(note.problem for note in found.notes)
    assert "2 damaged" in problems
    assert "1 row(s) of a newer schema" in problems
    assert "4 row(s) were dropped" in problems


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_bytes(data)
        read_rows(path, "m.jsonl")


def test_every_missing_file_is_named_at_once(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.document("workflow.json")
    run.rows("metrics.jsonl")
    run.rows("metrics.jsonl")
    run.history()
    run.contracts()
    assert [note.file for note in run.notes] == [
        "workflow.json",
        "metrics.jsonl",
        "chain/",
        "contracts/",
    ]


def test_values_that_were_not_measured_are_absent_and_not_zero(tmp_path: Path) -> None:
    row = {
        "schema_version": 1,
        "attempt": 1,
        "epoch": 1,
        "time": 1.0,
        "axis": "train/update",
        "step": 1,
        "values": {"train/loss": None, "train/lr": 0.1, "bad": "x", "flag": True},
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (point,) = RunFiles(tmp_path).points("train/update")
    assert point.values == {"train/lr": 0.1}


def result(root: Path, policy: str, **fields: object) -> None:
    folder = root / "evaluations" / policy / "held" / "tries" / "0"
    folder.mkdir(parents=True)
    made = {"time": 9.0, "state": "succeeded", "metrics": {"mean": 0.75}, **fields}
    (folder / "result.json").write_text(json.dumps(made))


def test_a_result_that_came_after_the_session_is_on_the_axis_once(tmp_path: Path) -> None:
    row = {
        "schema_version": 1, "attempt": 1, "epoch": 1, "time": 1.0, "axis": "evaluation/update",
        "step": 20, "values": {"evaluation/held/mean": 0.5},
    }  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    result(tmp_path, "e1.u20")
    result(tmp_path, "e1.u40")
    result(tmp_path, "e1.u60", state="skipped", reason="crashed", metrics={})
    result(tmp_path, "e1.u80", time="half")
    files = RunFiles(tmp_path)
    points = files.points("evaluation/update")
    assert [(p.step, p.values["evaluation/held/mean"]) for p in points] == [(20, 0.5), (40, 0.75)]
    assert any("e1.u80" in note.file for note in files.notes)
