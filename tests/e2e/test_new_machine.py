"""A run whose machine is gone with all that was on it, taken up on another from its copy."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from runtime.rundir import history
from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytest.importorskip("flask", reason="the server of moto (pip install -e '.[dev]')")
pytestmark = [pytest.mark.outage, pytest.mark.ray, pytest.mark.timeout(1800)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.client("s3").create_bucket(Bucket="copies")
    yield "s3://copies/e2e"
    server.stop()


def test_a_run_goes_on_where_its_copy_stands_after_the_loss_of_its_machine(
    make_run: Callable[..., Run], store: str
) -> None:
    run = make_run(
        "core.max_updates=10000",
        "data.epochs=200",
        "evaluation.every_updates=1000",
        f'checkpoint.upload="{store}"',
    )
    run.start()
    run.until(lambda: len(run.events("checkpoint.uploaded")) >= 3, "copies")
    lose_processes(run)
    lost_at = history.committed_update(run.records)
    copied = [row["update"] for row in run.events("checkpoint.uploaded")][-1]
    shutil.rmtree(run.root.path)

    run.start()
    run.until_epoch(2)
    epoch = history.newest_epoch(run.records)
    assert epoch is not None
    assert epoch.restored is not None
    restored = of_update(epoch.restored)
    # A copy that was whole may not have been told any more.
    assert copied <= restored <= lost_at
    run.until_committed(restored + 4)
    run.stop("final")
    run.finish()
    assert_whole(run, updates=run.end.update)
    assert run.events("checkpoint.uploaded")[-1]["update"] == run.end.update


def test_what_a_rewind_undid_stays_undone_after_the_loss_of_its_machine(
    make_run: Callable[..., Run], store: str
) -> None:
    run = make_run(
        "core.max_updates=10000",
        "data.epochs=200",
        "evaluation.every_updates=1000",
        f'checkpoint.upload="{store}"',
    )
    run.start()
    run.until(lambda: len(run.events("checkpoint.uploaded")) >= 3, "copies")
    lose_processes(run)
    commits = history.standing_commits(run.records)
    copied = [row["policy"] for row in run.events("checkpoint.uploaded")][-1]
    # All from the newest whole copy on: the store knows it, and it is about to be undone.
    undone = [commit for commit in commits if commit.update >= of_update(str(copied))]
    for commit in undone:
        # Retention may have deleted some: a copy takes longer than several commits.
        for path in (run.root.path / commit.folder).glob("*"):
            path.write_bytes(b"")

    run.start()
    run.until(lambda: bool(run.events("checkpoint.rewind_known")), "the store to know")
    lose_processes(run)
    rewound = history.newest_epoch(run.records)
    assert rewound is not None
    shutil.rmtree(run.root.path)

    run.start()
    run.until_epoch(rewound.epoch + 1)
    epoch = history.newest_epoch(run.records)
    assert epoch is not None
    assert epoch.restored is not None
    assert epoch.restored not in {commit.policy for commit in undone}
    assert epoch.restored == rewound.restored or epoch.restored.startswith(f"e{rewound.epoch}.")
    run.until_committed(of_update(epoch.restored) + 4)
    run.stop("final")
    run.finish()
    assert_whole(run, updates=run.end.update)


def lose_processes(run: Run) -> None:
    for process in run.processes():
        process.kill()
    run.until(lambda: not run.processes(), "all of it to be gone", attach=False)


def of_update(policy: str) -> int:
    return int(policy.rpartition("u")[2])
