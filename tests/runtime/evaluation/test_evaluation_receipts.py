import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.errors import ManifestConflict, PartialWrite
from runtime.evaluation import files, receipts
from runtime.evaluation.records import Request, Result, Started, TryError

REQUEST = Request(
    time=100.0,
    run="letters",
    policy="e1.u50",
    set="held_out",
    kind="final",
    required=True,
    mode="background",
    attempt=1,
    epoch=1,
    set_digest="a" * 64,
    sampling={"temperature": 0.0},
    seed=3,
)


def failure(fingerprint: str = "f1", *, exempt: bool = False) -> TryError:
    return TryError(
        error_class="EvaluationFailed",
        fingerprint=fingerprint,
        message="m",
        counts={"done": 3, "failed": 1, "untried": 0},
        is_exempt=exempt,
    )


def failed(time: float, fingerprint: str = "f1", *, exempt: bool = False) -> Result:
    return Result(time=time, state="failed", error=failure(fingerprint, exempt=exempt))


def receipt(folder: Path, **more: object) -> receipts.EvaluationReceipt:
    found = receipts.derive(folder, stands=True, **more)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_life_from_request_to_result(tmp_path: Path) -> None:
    assert receipts.derive(tmp_path, stands=True) is None
    files.write_request(tmp_path, REQUEST)
    assert receipt(tmp_path).state == "requested"
    claim = files.claim_try(tmp_path, by="flow", time=101.0, number=0)
    assert claim is not None
    assert claim[1].key.startswith("letters/e1.u50/held_out#0-")
    assert receipt(tmp_path).state == "submitted"
    files.start_try(tmp_path, 0, Started(time=102.0, host="h", pid=1, flow_run="fr"))
    assert receipt(tmp_path).state == "running"
    result = Result(
        time=130.0, state="succeeded", metrics={"mean": 0.9}, items="i", trainer_update=57
    )
    files.finish_try(tmp_path, 0, result)
    found = receipt(tmp_path)
    assert found.state == "succeeded"
    assert found.result == result
    assert (found.update, found.lag_updates, found.lag_s) == (50, 7, 30.0)
    assert found.times == {
        "requested": 100.0,
        "submitted": 101.0,
        "running": 102.0,
        "succeeded": 130.0,
    }
    assert found.next_try_at is None


def test_asking_twice_is_one_request_and_asking_for_something_else_is_refused(
    tmp_path: Path,
) -> None:
    files.write_request(tmp_path, REQUEST)
    again = REQUEST.model_copy(update={"time": 999.0, "attempt": 2, "epoch": 2})
    assert files.write_request(tmp_path, again) == REQUEST
    with pytest.raises(ManifestConflict):
        files.write_request(tmp_path, REQUEST.model_copy(update={"set_digest": "b" * 64}))


def test_of_many_submitters_with_one_receipt_a_single_one_submits(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    number = receipt(tmp_path).next_try
    barrier = threading.Barrier(8)
    won: list[str] = []

    def submit() -> None:
        barrier.wait(10)
        claim = files.claim_try(tmp_path, by="flow", time=1.0, number=number)
        if claim is not None:
            won.append(claim[1].key)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [key.rpartition("-")[0] for key in won] == ["letters/e1.u50/held_out#0"]
    assert files.claim_try(tmp_path, by="late", time=2.0, number=number) is None
    assert receipt(tmp_path).next_try == 1


def test_a_try_that_ended_or_lies_ahead_cannot_be_claimed(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    with pytest.raises(ValueError, match="after only 0"):
        files.claim_try(tmp_path, by="flow", time=1.0, number=1)
    files.skip(tmp_path, "busy", time=2.0)
    assert files.claim_try(tmp_path, by="flow", time=3.0, number=0) is None


def test_the_first_result_stands(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    files.claim_try(tmp_path, by="flow", time=1.0, number=0)
    first = Result(time=2.0, state="succeeded", metrics={"mean": 0.5})
    assert files.finish_try(tmp_path, 0, first) == first
    assert files.finish_try(tmp_path, 0, failed(3.0)) == first
    assert receipt(tmp_path).state == "succeeded"


def test_a_rewind_supersedes_what_has_no_result_and_keeps_what_has(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    found = receipts.derive(tmp_path, stands=False)
    assert found is not None
    assert (found.state, found.reason, found.next_try_at) == ("skipped", "superseded", None)
    files.claim_try(tmp_path, by="flow", time=1.0, number=0)
    files.finish_try(tmp_path, 0, Result(time=2.0, state="succeeded"))
    found = receipts.derive(tmp_path, stands=False)
    assert found is not None
    assert (found.state, found.stands) == ("succeeded", False)


def test_a_job_that_is_gone_without_a_result_has_crashed_and_comes_again(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    files.claim_try(tmp_path, by="flow", time=101.0, number=0)
    files.start_try(tmp_path, 0, Started(time=200.0, host="h", pid=1))
    assert receipt(tmp_path, is_alive=lambda _: None).state == "running"
    gone = receipt(tmp_path, is_alive=lambda _: False)
    assert (gone.state, gone.reason, gone.next_try_at) == ("skipped", "crashed", 800.0)


@pytest.mark.parametrize(
    ("reason", "comes_again"),
    [
        ("busy", False),
        ("export_failed", True),
        ("snapshot_missing", False),
        ("crashed", True),
        ("engine_unhealthy", True),
        ("superseded", False),
    ],
)
def test_which_skips_are_submitted_again(tmp_path: Path, reason: str, comes_again: bool) -> None:
    # A final one is never skipped as busy.
    kind = "cadence" if reason == "busy" else "final"
    files.write_request(tmp_path, REQUEST.model_copy(update={"kind": kind}))
    files.skip(tmp_path, reason, time=110.0)  # type: ignore[arg-type]
    found = receipt(tmp_path)
    assert (found.state, found.reason) == ("skipped", reason)
    assert (found.next_try_at is not None) is comes_again


def test_only_the_end_of_a_run_asks_again_and_only_for_what_was_busy(tmp_path: Path) -> None:
    cadence = REQUEST.model_copy(update={"kind": "cadence", "required": False})
    later = REQUEST.model_copy(update={"time": 200.0})
    for name, reason, asker, is_asked in (
        ("busy", "busy", later, True),
        ("by hand", "busy", cadence.model_copy(update={"time": 200.0}), False),
        ("crashed", "crashed", later, False),
        ("open", None, later, False),
    ):
        folder = tmp_path / name
        assert files.ask_once(folder, cadence)
        if reason:
            files.skip(folder, reason, time=110.0)  # type: ignore[arg-type]
        assert files.ask_once(folder, asker) is is_asked
        assert not files.ask_once(folder, asker.model_copy(update={"time": 300.0}))
        found = receipt(folder)
        assert found.request == (later if is_asked else cadence)
        assert (found.state == "requested") is (is_asked or reason is None)


def test_resubmissions_wait_longer_each_time_and_end_after_three(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    waits: list[float | None] = []
    for number in range(4):
        files.claim_try(tmp_path, by="flow", time=number * 10_000.0, number=number)
        end = number * 10_000.0 + 5
        files.finish_try(tmp_path, number, failed(end, f"f{number}"))
        at = receipt(tmp_path).next_try_at
        waits.append(None if at is None else at - end)
    assert waits == [600.0, 1200.0, 2400.0, None]


def test_the_same_failure_twice_is_not_tried_again_unless_exempt(tmp_path: Path) -> None:
    for name, exempt in (("plain", False), ("exempt", True)):
        folder = tmp_path / name
        files.write_request(folder, REQUEST)
        for number in range(2):
            files.claim_try(folder, by="flow", time=1.0, number=number)
            files.finish_try(folder, number, failed(2.0, "same", exempt=exempt))
        assert (receipt(folder).next_try_at is not None) is exempt


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    files.write_request(tmp_path, REQUEST)
    (tmp_path / "request.json").write_text('{"schema')
    with pytest.raises(PartialWrite, match=r"request\.json"):
        receipts.derive(tmp_path, stands=True)


def test_nothing_is_claimed_without_a_request(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.claim_try(tmp_path, by="flow", time=1.0, number=0)


def test_results_say_what_they_must() -> None:
    with pytest.raises(ValueError, match="failed without an error"):
        Result(time=1.0, state="failed")
    with pytest.raises(ValueError, match="succeeded with reason busy"):
        Result(time=1.0, state="succeeded", reason="busy")


class EvaluationFiles(RuleBasedStateMachine):
    """Any order of claims, starts and ends against a model of ten lines."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.ends: list[str] = []  # by try: submitted, running, or how it ended
        files.write_request(self.folder, REQUEST)

    @rule()
    def claim(self) -> None:
        number = receipt(self.folder).next_try
        assert number == len(self.ends)
        claimed = files.claim_try(self.folder, by="session", time=1.0)
        assert claimed is not None
        assert claimed[0] == number
        self.ends.append("submitted")

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.ends) - 1))
        files.start_try(self.folder, number, Started(time=2.0, host="h", pid=1))
        if self.ends[number] == "submitted":
            self.ends[number] = "running"

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), succeeds=st.booleans())
    def finish(self, data: st.DataObject, succeeds: bool) -> None:
        number = data.draw(st.integers(0, len(self.ends) - 1))
        result = Result(time=3.0, state="succeeded") if succeeds else failed(3.0)
        files.finish_try(self.folder, number, result)
        if self.ends[number] in ("submitted", "running"):
            self.ends[number] = result.state

    @invariant()
    def the_receipt_agrees(self) -> None:
        if not hasattr(self, "folder"):
            return
        expected = "requested"
        if self.ends:
            expected = "succeeded" if "succeeded" in self.ends else self.ends[-1]
        assert receipt(self.folder).state == expected

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            self.temporary.cleanup()


TestEvaluationFiles = EvaluationFiles.TestCase
TestEvaluationFiles.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
