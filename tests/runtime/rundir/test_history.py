"""Committed history of hand-made chains; the state machine covers the random ones."""

import pytest

from runtime.errors import Preempted, SessionLost
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.failure import Failure
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord, Record


def build(*entries: tuple) -> tuple[Record, ...]:
    """("epoch", restored seq | None), ("commit", update), ("end", state, error | None)."""
    records: list[Record] = []
    epoch = 0
    for seq, entry in enumerate(entries):
        common = {"seq": seq, "time": 0.0}
        if entry[0] == "epoch":
            epoch += 1
            restored = records[entry[1]] if entry[1] is not None else None
            records.append(
                EpochRecord(
                    epoch=epoch,
                    attempt=epoch,
                    host="h",
                    pid=1,
                    boot_id="b",
                    started=1.0,
                    reason="test",
                    restored=restored.policy if restored else None,
                    restored_seq=restored.seq if restored else None,
                    lease_s=None if records else 30.0,
                    **common,
                )
            )
        elif entry[0] == "commit":
            records.append(
                CommitRecord(
                    epoch=epoch,
                    format_version=1,
                    update=entry[1],
                    policy=str(PolicyId(epoch, entry[1])),
                    training_digest="t",
                    layout={},
                    data_fingerprint="d",
                    ledger_checksum="l",
                    consumed_digest="c",
                    folder="f",
                    files=(),
                    **common,
                )
            )
        else:
            failure = Failure.of(entry[2], step="segment/5", time=0.0) if entry[2] else None
            records.append(
                EndRecord(
                    epoch=epoch,
                    state=entry[1],
                    ended_by="test",
                    update=0,
                    failure=failure,
                    **common,
                )
            )
    return tuple(records)


def updates(records: tuple[Record, ...]) -> list[str]:
    return [c.policy for c in history.standing_commits(records)]


def test_an_empty_chain_has_no_history() -> None:
    assert history.newest_epoch(()) is None
    assert history.newest_commit(()) is None
    assert history.committed_update(()) == -1
    assert not history.is_complete(())
    assert not history.is_standing((), PolicyId(1, 0))
    assert history.rewinds(()) == ()
    assert history.restarts_since_commit(()) == 0


def test_a_fresh_start_undoes_everything() -> None:
    records = build(("epoch", None), ("commit", 0), ("commit", 5), ("epoch", None))
    assert updates(records) == []
    assert history.rewinds(records)[0].to == -1


def test_a_branch_that_was_cut_off_never_comes_back() -> None:
    records = build(
        ("epoch", None), ("commit", 0), ("commit", 5), ("commit", 9),
        ("epoch", 2), ("commit", 7), ("epoch", 5), ("commit", 12),
    )  # fmt: skip
    # e1.u9 was cut off by epoch 2; that epoch 3 restored u7 and went to u12 does not revive it.
    assert updates(records) == ["e1.u0", "e1.u5", "e2.u7", "e3.u12"]
    assert not history.is_standing(records, PolicyId(1, 9))
    assert history.is_standing(records, PolicyId(1, 4))


@pytest.mark.parametrize(
    ("policy", "stands"),
    [
        (PolicyId(1, 5), True),
        (PolicyId(1, 6), False),
        (PolicyId(2, 5), True),
        (PolicyId(2, 100), True),
        (PolicyId(3, 5), False),
    ],
)
def test_a_receipt_stands_if_every_later_epoch_restored_at_least_it(policy, stands: bool) -> None:
    records = build(("epoch", None), ("commit", 0), ("commit", 5), ("epoch", 2))
    assert history.is_standing(records, policy) is stands


def test_only_the_newest_epochs_end_is_the_end() -> None:
    records = build(("epoch", None), ("commit", 0), ("end", "complete", None))
    assert history.is_complete(records)
    resumed = build(("epoch", None), ("commit", 0), ("end", "complete", None), ("epoch", 1))
    assert not history.is_complete(resumed)
    assert history.current_end(resumed) is None


def test_failures_count_between_commits_and_by_what_they_say() -> None:
    died = SessionLost("rank 3 of e1.u5 died after 17.2 s")
    again = SessionLost("rank 1 of e2.u5 died after 9 s")
    other = SessionLost("out of memory")
    records = build(("epoch", None), ("commit", 0), ("end", "failed", died), ("epoch", 1),
                    ("end", "failed", other), ("epoch", 1), ("end", "failed", again))  # fmt: skip
    (fingerprint, count), *_ = history.failures_since_commit(records).most_common()
    assert count == 2
    assert history.is_deterministic(records, fingerprint)
    assert history.restarts_since_commit(records) == 2
    later = build(("epoch", None), ("commit", 0), ("end", "failed", died), ("epoch", 1),
                  ("commit", 3), ("end", "failed", again))  # fmt: skip
    assert not history.is_deterministic(later, fingerprint)


def test_preemption_is_never_deterministic() -> None:
    gone = Preempted("taken")
    records = build(("epoch", None), ("end", "failed", gone), ("epoch", None),
                    ("end", "failed", gone))  # fmt: skip
    assert not history.failures_since_commit(records)
