"""Commits copied to an object store, and a run taken up from there on an empty machine."""

import copy
import itertools
import json
import shutil
from functools import partial

import anyio
import pytest

from runtime.checkpoints.bucket import Bucket, StoreUnreachable
from runtime.checkpoints.copied import read_copied
from runtime.checkpoints.download import restore_copy
from runtime.checkpoints.resume import find_restorable
from runtime.checkpoints.retention import retain
from runtime.checkpoints.upload import make_known, upload
from runtime.checkpoints.uploads import Uploads
from runtime.errors import ConfigError, ManifestConflict, PartialWrite
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.journal import read_rows
from runtime.rundir.records import ChainUnreadable
from runtime.session.filling import fill_empty_root
from tests.runtime.checkpoints.memory_bucket import MemoryBucket
from tests.runtime.checkpoints.tiny_run import new_root, take_over, trained

MIB = 1 << 20
pytest.importorskip("flask", reason="the server of moto (pip install -e '.[dev]')")


@pytest.fixture(scope="module")
def store():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def whole_store(store):
    with pytest.MonkeyPatch.context() as environ:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": store,
        }.items():
            environ.setenv(name, value)
        made = Bucket.of("s3://bucket", part_bytes=5 * MIB)
        made._client.create_bucket(Bucket="bucket")
        yield made


def folder_of(whole_store, name):
    """A folder of its own; a client takes a second to make."""
    made = copy.copy(whole_store)
    made._prefix = f"{name}/"
    return made


@pytest.fixture
def bucket(whole_store, request):
    return folder_of(whole_store, request.node.name)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = new_root(tmp_path_factory.mktemp("made") / "run")
    anyio.run(trained, root, 3)
    (root.rollouts / "deep").mkdir(parents=True)
    (root.rollouts / "000001-e1.parquet").write_bytes(b"rows")
    (root.rollouts / "deep" / "more").write_bytes(b"more")
    return root


@pytest.fixture
def root(made, tmp_path):
    shutil.copytree(made.path, tmp_path / "run")
    return new_root(tmp_path / "run")


def commits(root):
    return history.standing_commits(Chain(root).read())


def content(root):
    """All of the run that a copy promises, by name."""
    kept = ("chain", "checkpoints", "ledger", "rollouts")
    return {
        str(p.relative_to(root.path)): p.read_bytes()
        for folder in kept
        for p in (root.path / folder).rglob("*")
        if p.is_file()
    }


def test_a_run_is_taken_up_on_an_empty_machine_from_its_copy(root, bucket, tmp_path):
    newest = commits(root)[-1]
    upload(root, bucket, newest, keep=1)
    empty = new_root(tmp_path / "elsewhere")
    assert restore_copy(empty, bucket) == newest
    retain(root, 1, keep=1)
    assert content(empty) == content(root)
    found = find_restorable(empty, Chain(empty).read())
    assert (found.commit, found.history_gap, found.damaged) == (newest, None, ())
    assert len(found.segments) == len(commits(root))
    # The next owner goes on from there, and its commits extend the same copy.
    take_over(empty, restored=newest)
    anyio.run(partial(trained, empty, 5))
    upload(empty, bucket, commits(empty)[-1], keep=1)
    third = new_root(tmp_path / "third")
    assert restore_copy(third, bucket).update > newest.update


def test_the_commit_record_appears_last_and_twice_sends_nothing(root, bucket, monkeypatch):
    calls = []
    create, send = bucket.create, bucket.send

    def noted(call):
        def inner(name, *args, **options):
            calls.append(name)
            return call(name, *args, **options)

        return inner

    monkeypatch.setattr(bucket, "create", noted(create))
    monkeypatch.setattr(bucket, "send", noted(send))
    newest = commits(root)[-1]
    assert upload(root, bucket, newest, keep=2) > 0
    assert calls[-1] == f"chain/{newest.seq}.json"
    records = [name for name in calls if name.startswith("chain/")]
    assert records == [f"chain/{n}.json" for n in range(newest.seq + 1)]
    # The epoch before all that bears its number, the commits behind all that they name.
    assert [calls[0], *calls[1 - len(records) :]] == records
    calls.clear()
    assert upload(root, bucket, newest, keep=2) == 0
    assert calls == []


def test_a_copy_cut_off_anywhere_is_an_older_one_and_is_made_whole(
    root, whole_store, tmp_path, monkeypatch
):
    older, newest = commits(root)[-2:]

    def cut(call, left):
        def inner(*args, **options):
            if not left:
                raise StoreUnreachable("cut")
            left.pop()
            return call(*args, **options)

        return inner

    for after in itertools.count():
        bucket = folder_of(whole_store, f"cut-{after}")
        upload(root, bucket, older, keep=2)
        left = [1] * after
        with monkeypatch.context() as cutting:
            for name in ("create", "send"):
                cutting.setattr(bucket, name, cut(getattr(bucket, name), left))
            try:
                upload(root, bucket, newest, keep=2)
                break
            except StoreUnreachable:
                found = restore_copy(new_root(tmp_path / f"early-{after}"), bucket)
                assert found == older
        upload(root, bucket, newest, keep=2)
        assert restore_copy(new_root(tmp_path / f"late-{after}"), bucket) == newest
    assert after == 4, "two files, a ledger segment, a record"


def test_of_two_owners_on_two_disks_one_is_stopped(root, bucket, tmp_path):
    newest = commits(root)[-1]
    upload(root, bucket, newest, keep=2)
    other = new_root(tmp_path / "other")
    restore_copy(other, bucket)
    take_over(other, restored=newest)
    anyio.run(trained, other, 5)
    anyio.run(trained, root, 6)  # the first one lives after all
    upload(other, bucket, commits(other)[-1], keep=2)
    with pytest.raises(ManifestConflict, match="another history"):
        upload(root, bucket, commits(root)[-1], keep=2)
    third = new_root(tmp_path / "third")
    assert restore_copy(third, bucket) == commits(other)[-1]


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_damage_in_the_store_is_found_on_reading_and_the_commit_before_is_taken(
    root, bucket, tmp_path, harm
):
    older, newest = commits(root)[-2:]
    for each in (older, newest):
        upload(root, bucket, each, keep=2)
    name = next(f.name for f in newest.files if not f.name.startswith("ledger/"))
    key = bucket._prefix + f"{newest.folder}/{name}"
    data = bucket.read(f"{newest.folder}/{name}")
    bucket._client.delete_object(Bucket=bucket._bucket, Key=key)
    if harm != "gone":
        bad = data[:-1] if harm == "cut" else bytes([data[0] ^ 1]) + data[1:]
        bucket._client.put_object(Bucket=bucket._bucket, Key=key, Body=bad)
    empty = new_root(tmp_path / "elsewhere")
    assert restore_copy(empty, bucket) == older
    found = find_restorable(empty, Chain(empty).read())
    assert found.commit == older
    assert [d.commit for d in found.damaged] == [newest]
    assert not list(empty.checkpoints.glob(".*"))


def test_a_gap_in_the_history_of_prompts_keeps_no_commit_from_the_store(root, bucket, tmp_path):
    """A session that must tell of a rewind would be held by it for ever."""
    older, restored, undone = commits(root)[-3:]
    for commit in (older, undone):
        for entry in commit.files:
            if entry.name.startswith("ledger/") == (commit is older):
                folder = root.path if commit is older else root.path / commit.folder
                (folder / entry.name).unlink()
    take_over(root, restored=restored)
    make_known(root, bucket, keep=1)
    empty = new_root(tmp_path / "elsewhere")
    assert restore_copy(empty, bucket) == restored
    for each in (root, empty):
        found = find_restorable(each, Chain(each).read())
        assert found.commit == restored
        assert found.history_gap is not None


def test_a_copy_without_a_whole_commit_starts_nothing_over(root, bucket, tmp_path):
    newest = commits(root)[-1]
    upload(root, bucket, newest, keep=1)
    bucket.delete([n for n in bucket.names("") if n.startswith(("checkpoints/", "ledger/"))])
    with pytest.raises(PartialWrite, match="no commit in"):
        restore_copy(new_root(tmp_path / "elsewhere"), bucket)


def test_a_hole_in_the_copied_chain_is_no_history(root, bucket, tmp_path):
    upload(root, bucket, commits(root)[-1], keep=1)
    bucket.delete(["chain/1.json"])
    with pytest.raises(ChainUnreadable, match="is missing"):
        restore_copy(new_root(tmp_path / "elsewhere"), bucket)


def test_a_root_with_a_history_is_left_as_it_is(root, bucket):
    upload(root, bucket, commits(root)[0], keep=1)
    before = content(root)
    assert restore_copy(root, bucket) is None
    assert content(root) == before


def test_epochs_before_the_first_commit_keep_their_numbers(bucket, tmp_path):
    root = new_root(tmp_path / "run")
    take_over(root)
    make_known(root, bucket, keep=1)
    empty = new_root(tmp_path / "elsewhere")
    assert restore_copy(empty, bucket) is None
    assert take_over(empty) == 2


def test_an_empty_store_restores_nothing(bucket, tmp_path):
    assert restore_copy(new_root(tmp_path / "elsewhere"), bucket) is None


def test_a_kill_while_it_is_fetched_leaves_no_history_and_the_next_call_finishes(
    root, bucket, tmp_path, monkeypatch
):
    newest = commits(root)[-1]
    upload(root, bucket, newest, keep=1)
    empty = new_root(tmp_path / "elsewhere")
    fetch = bucket.fetch
    for after in range(40):
        left = [after]

        def dying(name, path, left=left):
            if not left[0]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"half")
                raise KeyboardInterrupt
            left[0] -= 1
            return fetch(name, path)

        with monkeypatch.context() as dies:
            dies.setattr(bucket, "fetch", dying)
            try:
                restore_copy(empty, bucket)
                break
            except KeyboardInterrupt:
                assert Chain(empty).read() == ()
    assert after > 5
    retain(root, 1, keep=1)
    assert content(empty) == content(root)


def test_old_trainer_state_leaves_the_store_and_history_stays(root, bucket, tmp_path):
    for each in commits(root):
        upload(root, bucket, each, keep=2)
    folders = {name.split("/")[1] for name in bucket.names("checkpoints/")}
    assert folders == {"000000-e1", "000002-e1", "000003-e1"}
    assert len(list(bucket.names("ledger/"))) == len(commits(root))


def test_large_files_travel_in_parts_and_come_back_whole(bucket, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (12 * MIB // 256))
    bucket.send("large", path, sha256="s")
    head = bucket._client.head_object(Bucket=bucket._bucket, Key=bucket._prefix + "large")
    assert head["ETag"].strip('"').endswith("-3")
    assert bucket.has("large", size=12 * MIB, sha256="s")
    assert not bucket.has("large", size=12 * MIB, sha256="other")
    assert bucket.fetch("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


@pytest.fixture(params=["served", "in memory"])
def any_bucket(request):
    """The store that the model of a copied run is checked with keeps what the real one does."""
    return MemoryBucket() if request.param == "in memory" else request.getfixturevalue("bucket")


def test_a_name_is_created_once(any_bucket):
    bucket = any_bucket
    assert bucket.create("a", b"1")
    assert not bucket.create("a", b"2")
    assert bucket.read("a") == b"1"
    assert bucket.read("b") is None
    assert list(bucket.names("")) == ["a"]


def test_a_file_is_there_whole_with_its_digest_until_it_is_deleted(any_bucket, tmp_path):
    bucket, path = any_bucket, tmp_path / "file"
    assert not bucket.has("x/file", size=4, sha256="s")
    for content, sha256 in ((b"once", "s"), (b"twice", "t")):
        path.write_bytes(content)
        bucket.send("x/file", path, sha256=sha256)
        assert bucket.has("x/file", size=len(content), sha256=sha256)
    assert not bucket.has("x/file", size=5, sha256="s")
    assert not bucket.has("x/file", size=4, sha256="t")
    assert bucket.fetch("x/file", tmp_path / "new" / "back")
    assert (tmp_path / "new" / "back").read_bytes() == b"twice"
    assert list(bucket.names("x/")) == ["x/file"]
    bucket.delete(["x/file", "x/none"])
    assert list(bucket.names("x/")) == []
    assert not bucket.fetch("x/file", tmp_path / "none")


@pytest.mark.parametrize("url", ["/x", "s3://", "s3:///p", "http://b/p"])
def test_what_is_no_object_store_is_refused(url):
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        Bucket.of(url)


def test_only_the_newest_of_those_that_wait_is_copied_and_a_store_that_was_away_gets_all(
    root, bucket, tmp_path, monkeypatch
):
    """Uploads beside training: the first fails, and what follows brings everything along."""
    said, copied = [], anyio.Event()

    def record(event, **_):
        said.append(str(event))
        if uploads.copied is not None:
            copied.set()

    uploads = Uploads(root, bucket, keep=2, record=record)

    def away(*_, **__):
        raise StoreUnreachable("away")

    async def main():
        with monkeypatch.context() as broken:
            broken.setattr(bucket, "send", away)
            uploads.committed(commits(root)[1])
            assert not await uploads.settle()
        assert uploads.pinned == {commits(root)[1].policy}
        assert read_copied(root) is None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(uploads.run)
            for each in commits(root)[2:]:
                uploads.committed(each)
            await copied.wait()
            tasks.cancel_scope.cancel()
        assert await uploads.settle()

    anyio.run(main)
    assert uploads.copied == commits(root)[-1]
    assert uploads.pinned == set()
    copied_in_root = read_copied(root)
    assert str(copied_in_root.policy) == commits(root)[-1].policy
    assert copied_in_root.detail["store"] == str(bucket)
    assert said == ["checkpoint.upload_failed", "checkpoint.uploaded"]
    shutil.rmtree(root.path)
    assert restore_copy(new_root(root.path), bucket) == uploads.copied


def test_an_attempt_on_an_empty_machine_begins_with_the_copy(root, bucket, tmp_path):
    newest = commits(root)[-1]
    upload(root, bucket, newest, keep=1)
    empty = new_root(tmp_path / "elsewhere")
    attempt = empty.attempt(1)
    attempt.path.mkdir()
    url = f"s3://bucket/{bucket._prefix}"
    attempt.run.write_text(json.dumps({"checkpoint": {"upload": url}}))
    for _ in range(2):
        fill_empty_root(attempt)
    assert commits(empty)[-1] == newest
    assert [row["event"] for row in read_rows(empty.journal)] == ["checkpoint.fetched"]
    attempt.run.write_text(json.dumps({"checkpoint": {"upload": None}}))
    shutil.rmtree(empty.chain)
    fill_empty_root(attempt)
    assert not empty.chain.exists(), "without the field nothing is asked of any store"
