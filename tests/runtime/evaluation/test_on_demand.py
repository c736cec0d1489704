"""What a person asks for: any set at any update that is left, once, and never in anybody's way."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.run import RunSpec
from runtime.clock import SystemClock
from runtime.errors import ConfigError
from runtime.evaluation.on_demand import ask_by_hand
from runtime.evaluation.receipts import derive
from runtime.recipes import laptop
from runtime.rundir.chain import Chain
from runtime.rundir.records import EndRecord
from tests.runtime.evaluation.test_job import Job

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = tmp_path_factory.mktemp("made") / "laptop"
    laptop.make(made, seed=3, prompts=8, holdout=8, warm_up_until=None)
    return Job(tmp_path_factory.mktemp("run"), made)


@pytest.fixture(autouse=True)
def nothing_asked(job: Job) -> Iterator[None]:
    yield
    for path in sorted(job.root.evaluations.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def ask(job: Job, spec: RunSpec | None = None, **asked: object) -> list[Path]:
    given = {"update": None, "names": [], **asked}
    return ask_by_hand(job.root, spec or job.spec, clock=SystemClock(), **given)  # type: ignore[arg-type]


def test_the_newest_commit_is_asked_for_once_and_keeps_its_files(job: Job) -> None:
    (folder,) = ask(job)
    assert folder == job.evaluation
    receipt = derive(folder, stands=True)
    assert receipt is not None
    assert (receipt.state, receipt.request.snapshot) == ("requested", None)
    assert (receipt.request.kind, receipt.request.required) == ("cadence", False)
    assert receipt.request.set_digest == job.frozen.digest
    before = (folder / "request.json").read_bytes()
    assert ask(job, update=0, names=["held"]) == [folder]
    assert (folder / "request.json").read_bytes() == before


def test_a_request_of_the_session_is_the_one_that_counts(job: Job) -> None:
    job.ask()
    assert ask(job) == [job.evaluation]
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    assert receipt.request.kind == "final"


def test_a_session_that_asks_between_our_look_and_our_request_is_the_one_that_counts(
    job: Job,
) -> None:
    class Meanwhile(SystemClock):
        """Read once all was looked at, for the time of our request."""

        def time(self) -> float:
            job.ask()
            return super().time()

    assert ask_by_hand(job.root, job.spec, update=None, names=[], clock=Meanwhile()) == [
        job.evaluation
    ]
    receipt = derive(job.evaluation, stands=True)
    assert receipt is not None
    assert receipt.request.kind == "final"


def test_what_is_not_there_is_refused_with_what_is(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"update 7 is left .* there are: 0"):
        ask(job, update=7)
    with pytest.raises(ConfigError, match="no evaluation set is called 'test'; there are: held"):
        ask(job, names=["test"])
    assert not any(job.root.evaluations.rglob("request.json"))


def test_where_a_session_may_evaluate_itself_nobody_else_does(job: Job) -> None:
    evaluation = job.spec.evaluation.model_copy(update={"mode": "shared"})
    shared = job.spec.model_copy(update={"evaluation": evaluation})
    with pytest.raises(ConfigError, match="its own engines"):
        ask(job, shared)
    chain = Chain(job.root)
    chain.read()
    end = chain.append(
        EndRecord(epoch=1, time=0.0, state="complete", ended_by="max_updates", update=0)
    )
    assert ask(job, shared) == [job.evaluation]
    (job.root.chain / f"{end.seq}.json").unlink()
