"""What must hold of a finished run, however it got there."""

from collections import Counter

from runtime.checkpoints.files import damage
from runtime.data.history import consumed_prompts
from runtime.evaluation.receipts import derive
from runtime.rundir.records import CommitRecord
from runtime.session.status import COMPLETE, look
from tests.e2e.running import Run


def assert_whole(run: Run, *, updates: int, consumed: int | None = None) -> None:
    """Complete, every prompt accounted for, all evidence there, nothing half and nobody left."""
    assert (run.end.state, run.end.update) == ("complete", updates), run.log()
    assert_ledger_exact(run, consumed=consumed or 4 * updates)
    status = look(run.root)
    assert status.exit_code == COMPLETE, status
    assert status.expected.updates == status.seen.updates == updates
    assert status.expected.evaluations == status.seen.evaluations
    assert status.expected.exports == status.seen.exports
    assert run.commits[-1].update == updates
    assert_no_half_files(run)
    assert run.processes() == []


def assert_stopped(run: Run, ended_by: str, activity: str) -> None:
    """It committed all it had trained, and owes neither an export nor an evaluation."""
    end = run.until_ended()
    assert (end.state, end.ended_by, end.activity) == ("training", ended_by, activity), run.log()
    assert run.commits[-1].update == end.update
    assert_ledger_exact(run, consumed=4 * end.update)
    assert not run.root.export.exists()
    for folder in run.root.evaluations.glob(f"e*.u{end.update}/*"):
        receipt = derive(folder, stands=True)  # of the one that was terminated, at the same update
        assert receipt is not None
        assert receipt.reason == "superseded"
    assert run.view.activity == activity


def assert_ledger_exact(run: Run, *, consumed: int) -> None:
    """Every prompt of committed history has one end, once; and the digest follows from them."""
    report = run.ledger()
    assert (report.lost, report.doubled) == (0, 0)
    assert report.consumed == consumed
    times = Counter(prompt for prompt, _ in consumed_prompts(run.segments()))
    assert len(times) == consumed
    assert set(times.values()) <= {1}
    assert report.digest == run.commits[-1].consumed_digest


def assert_no_half_files(run: Run) -> None:
    """Folders without a commit record may lie about only while somebody writes them."""
    kept = {c.folder for c in run.records if isinstance(c, CommitRecord)}
    there = {f"checkpoints/{p.name}" for p in run.root.checkpoints.iterdir()}
    assert there <= kept, there - kept
    assert damage(run.root, run.commits[-1]) == []
