"""The checks of a drill find what is wrong: planted here, one thing at a time."""

from pathlib import Path

import pytest

from configs.availability import unavailable
from runtime.drill import checks
from runtime.drill.campaign import recovered_at
from runtime.drill.catalogue import Blow
from runtime.drill.checks import Measure, reached, redone
from runtime.drill.job import VARIANTS, Variant, make_job
from runtime.drill.observing import Observer, Seen
from runtime.rundir.records import CommitRecord
from tests.runtime.drill.records import chain, commit, epoch

UNDISTURBED = Measure.of(chain(epoch(1), commit(1, 2, state="a"), commit(1, 4, state="b")))


@pytest.mark.parametrize(
    ("state", "digest", "found"),
    [("b", "c", []), ("f", "c", ["states differ"]), ("b", "x", ["digests differ"])],
)
def test_another_state_or_another_history_is_found(state: str, digest: str, found) -> None:
    ours = Measure.of(chain(epoch(1), commit(1, 2), commit(1, 4, state=state, digest=digest)))
    problems: list[str] = []
    checks._equal(ours, UNDISTURBED, 4, problems)
    assert [p.partition(" from")[0] for p in problems] == found


def test_a_missing_last_commit_is_found() -> None:
    problems: list[str] = []
    checks._equal(Measure.of(chain(epoch(1), commit(1, 2))), UNDISTURBED, 4, problems)
    assert problems == ["no state of update 4 is committed"]


def test_half_files_and_folders_without_a_commit_are_found(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", tmp_path, "deterministic", updates=2)
    first = commit(1, 2)
    kept = job.root.path / first.folder
    kept.mkdir(parents=True)
    (job.root.checkpoints / "000004-e1").mkdir()
    (job.root.path / ".workflow.json.0.1.2.tmp").write_text("{")
    (job.root.path / "plan.json").write_text('{"half": ')
    problems: list[str] = []
    checks._files(job, chain(epoch(1), first), problems)
    text = "\n".join(problems)
    assert "checkpoints/000004-e1 lies about without a commit" in text
    assert ".workflow.json.0.1.2.tmp was left half-written" in text
    assert "plan.json is no JSON" in text
    assert "trainer-00000-of-00001.safetensors" in text
    assert len(problems) == 4


def test_updates_made_again_are_counted_from_what_was_reached() -> None:
    first, second = (r for r in chain(epoch(1), commit(1, 2), epoch(2)) if r.seq in (0, 1))
    assert isinstance(second, CommitRecord)
    records = chain(first, second, epoch(2, second), epoch(3, second))
    assert redone(records, {1: 5, 2: 3}) == (5 - 2) + (3 - 2)


def test_a_run_has_recovered_once_the_next_epoch_commits(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", tmp_path, "ahead", updates=2)
    assert job.load().spec.rollout.engines == 2
    observer = Observer(job)
    ends = Blow(name="kill guard", how="signal", role="guard", ends_epoch=True)
    spares = Blow(name="slow", how="point")
    observer.seen += [Seen(time=11.0, what="progress: commit")]
    assert recovered_at(observer, ends, 10.0) is None
    assert recovered_at(observer, spares, 10.0) == 11.0
    observer.seen += [Seen(time=12.0, what="decided: epoch")]
    assert recovered_at(observer, ends, 10.0) is None
    observer.seen += [Seen(time=15.0, what="progress: commit")]
    assert recovered_at(observer, ends, 10.0) == 15.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_run_that_can_start(tmp_path: Path, variant: Variant) -> None:
    (tmp_path / "made" / "model").mkdir(parents=True)
    job = make_job(tmp_path / "job", tmp_path / "made", variant, updates=6)
    spec = job.load().spec
    assert unavailable(spec) == []
    assert spec.core.max_updates == 6
    if variant == "deterministic":
        assert (spec.rollout.engines, spec.rollout.max_running_requests) == (1, 1)
        assert (spec.async_.max_staleness, spec.rollout.seed) == (0, 17)


def test_what_an_epoch_reached_is_the_last_update_it_published() -> None:
    rows = [
        {"event": "publication.committed", "epoch": 1, "update": update} for update in (0, 1, 2)
    ]
    rows += [
        {"event": "publication.started", "epoch": 1, "update": 3},
        {"event": "publication.committed", "epoch": 2, "update": 2},
        {"event": "engine.verified", "epoch": 2, "update": None},
    ]
    assert reached(rows) == {1: 2, 2: 2}
