"""A final copy that the store did not take: `status` owes it, `milepost upload` brings it."""

import json
from pathlib import Path

import boto3
import pytest
from moto import mock_aws
from typer.testing import CliRunner

from configs.run import RunSpec
from flows.cli import build_app
from flows.commands._standing import lines
from runtime.checkpoints.bucket import StoreUnreachable
from runtime.checkpoints.copied import read_copied, write_copied
from runtime.rundir import history
from runtime.session.status import look
from tests.flows.made_run import MadeRun

STORE = "s3://copies/made"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return MadeRun(tmp_path)


def with_upload(made: MadeRun) -> None:
    spec = RunSpec.model_validate_json(made.root.run.read_bytes())
    checkpoint = spec.checkpoint.model_copy(update={"upload": STORE})
    made.root.run.write_text(spec.model_copy(update={"checkpoint": checkpoint}).model_dump_json())


def milepost(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(arguments), list(arguments))
    return done.exit_code, done.stdout


def test_a_final_copy_that_failed_is_owed_until_it_is_brought(made: MadeRun) -> None:
    made.run_to(4)
    assert [row.name for row in look(made.root).rows if row.name == "copy"] == []
    with_upload(made)
    earlier = next(c for c in history.standing_commits(made.chain.read()) if c.update == 2)
    write_copied(made.root, earlier, store=STORE, num_bytes=1, time=0.0)

    status = look(made.root)
    (row,) = [row for row in status.rows if not row.is_filled]
    assert (row.name, row.found) == ("copy", f"e1.u2 whole in {STORE}, e1.u4 is not in {STORE} yet")
    assert (status.outstanding, status.exit_code) == (("upload/4",), 5)
    assert list(lines(status, "made"))[-1] == "\nnext: milepost upload made"

    root = str(made.root.path)
    with mock_aws():
        code, said = milepost("upload", root, "--json")
        assert (code, json.loads(said)["error"]) == (1, StoreUnreachable.__name__)
        assert look(made.root).exit_code == 5
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="copies")
        code, said = milepost("upload", root, "--json")
        assert code == 0, said
        assert json.loads(said)["policy"] == "e1.u4"
        there = {o["Key"] for o in s3.list_objects_v2(Bucket="copies")["Contents"]}
        newest = history.newest_commit(made.chain.read())
        assert newest is not None
        assert f"made/chain/{newest.seq}.json" in there
        assert json.loads(milepost("upload", root, "--json")[1])["num_bytes"] == 0
    assert look(made.root).exit_code == 0


def test_without_a_receipt_no_copy_is_known(made: MadeRun) -> None:
    made.run_to(4)
    with_upload(made)
    status = look(made.root)
    assert (status.outstanding, status.exit_code) == (("upload/4",), 5)
    made.root.receipts.mkdir(exist_ok=True)
    (made.root.receipts / "upload.json").write_text('{"step": "upl')
    assert look(made.root).exit_code == 5


def test_a_copy_of_what_a_rewind_undid_does_not_count(made: MadeRun) -> None:
    made.begin()
    first, undone = made.commit(0), None
    for update in (1, 2):
        made.train(update)
    undone = made.commit(2)
    write_copied(made.root, undone, store=STORE, num_bytes=1, time=0.0)
    made.begin(restored=first)
    for update in (1, 2):
        made.publish(update)
    again = made.commit(2)
    made.keep_books()
    made.end("complete", 2)
    with_upload(made)
    assert "upload/2" in look(made.root).outstanding
    write_copied(made.root, again, store=STORE, num_bytes=1, time=0.0)
    assert "upload/2" not in look(made.root).outstanding


def test_a_receipt_of_a_later_commit_stays(made: MadeRun) -> None:
    made.run_to(4)
    earlier, later = (
        next(c for c in history.standing_commits(made.chain.read()) if c.update == u)
        for u in (2, 4)
    )
    write_copied(made.root, later, store=STORE, num_bytes=1, time=0.0)
    write_copied(made.root, earlier, store=STORE, num_bytes=1, time=0.0)
    copied = read_copied(made.root)
    assert copied is not None
    assert copied.update == 4


def test_a_receipt_of_a_later_epoch_stays_whatever_its_update(made: MadeRun) -> None:
    """An owner that was passed over finishes its copy after its successor has."""
    made.begin()
    first = made.commit(0)
    for update in (1, 2):
        made.train(update)
    theirs = made.commit(2)
    made.begin(restored=first)
    made.publish(1)
    ours = made.commit(1)
    write_copied(made.root, ours, store=STORE, num_bytes=1, time=0.0)
    write_copied(made.root, theirs, store=STORE, num_bytes=1, time=0.0)
    copied = read_copied(made.root)
    assert copied is not None
    assert str(copied.policy) == ours.policy


def test_a_receipt_of_a_later_epoch_goes_where_a_rewind_undid_it(made: MadeRun) -> None:
    """What was restored is older than the newest copy, and nothing newer is ever committed."""
    made.begin()
    made.commit(0)
    made.train(1)
    standing = made.commit(1)
    made.begin(restored=standing)
    made.train(2)
    undone = made.commit(2)
    write_copied(made.root, undone, store=STORE, num_bytes=1, time=0.0)
    made.begin(restored=standing)
    made.publish(1)
    made.keep_books()
    made.end("complete", 1)
    with_upload(made)
    (row,) = [row for row in look(made.root).rows if row.name == "copy"]
    assert row.found == f"e2.u2, undone since, whole in {STORE}, e1.u1 is not in {STORE} yet"
    assert row.missing == ("upload/1",)

    write_copied(made.root, standing, store=STORE, num_bytes=0, time=0.0)
    (row,) = [row for row in look(made.root).rows if row.name == "copy"]
    assert (row.found, row.missing) == (f"e1.u1 whole in {STORE}", ())
    # Its writer may be slow, and finish only now.
    write_copied(made.root, undone, store=STORE, num_bytes=1, time=0.0)
    assert str(read_copied(made.root).policy) == "e1.u1"  # type: ignore[union-attr]


def test_a_copy_in_another_store_does_not_count(made: MadeRun) -> None:
    made.run_to(4)
    with_upload(made)
    newest = history.newest_commit(made.chain.read())
    assert newest is not None
    write_copied(made.root, newest, store="s3://old/made", num_bytes=1, time=0.0)
    status = look(made.root)
    (row,) = [row for row in status.rows if not row.is_filled]
    assert row.found == f"e1.u4 whole in s3://old/made, e1.u4 is not in {STORE} yet"
    assert (status.outstanding, status.exit_code) == (("upload/4",), 5)
    write_copied(made.root, newest, store=STORE, num_bytes=0, time=0.0)
    assert look(made.root).exit_code == 0


def test_a_run_without_a_store_is_refused(made: MadeRun) -> None:
    made.run_to(2)
    code, said = milepost("upload", str(made.root.path), "--json")
    assert code == 1
    assert "checkpoint.upload" in json.loads(said)["message"]
