"""Round trips over both stores, and everything that can go wrong without a run noticing."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from runtime.caches import publishing
from runtime.caches.archive import pack
from runtime.caches.key import CacheKey, key_of
from runtime.caches.parts import PARTS, environment
from runtime.caches.publishing import Publisher, restore
from runtime.caches.stores import BucketStore, CacheStore, FolderStore, open_store
from runtime.clock import SystemClock
from runtime.errors import DiskFull

KEY = CacheKey(image="i", machine="m", versions={"torch": "2"}, model="c", layout={"ranks": 1})


@pytest.fixture(params=["folder", "bucket"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CacheStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "store")
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield open_store("s3://bucket/caches")


def publisher(root: Path, store: CacheStore, key: CacheKey = KEY, **changed: object) -> Publisher:
    fields = {"publishers": 2, "wait_s": 20.0, "by": "test", "clock": SystemClock(), **changed}
    return Publisher(root=root, store=store, key=key, **fields)  # type: ignore[arg-type]


def compiled(root: Path, **parts: bytes) -> Path:
    for part, content in parts.items():
        (root / part / "deep").mkdir(parents=True)
        (root / part / "deep" / "kernel").write_bytes(content)
    return root


def outcomes(made: Publisher) -> dict[str, str]:
    return {report.part: report.outcome for report in made.publish()}


def test_what_one_session_compiled_the_next_one_finds(store: CacheStore, tmp_path: Path) -> None:
    root = compiled(tmp_path / "a", inductor=b"graph" * 1000, triton=b"cubin")
    assert outcomes(publisher(root, store)) == {"inductor": "published", "triton": "published"}
    found = restore(tmp_path / "b", store, KEY, wait_s=20.0)
    assert (found.parts, found.problems) == ({"inductor": 1, "triton": 1}, {})
    assert (tmp_path / "b/inductor/deep/kernel").read_bytes() == b"graph" * 1000
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"inductor", "triton"}
    assert outcomes(publisher(tmp_path / "b", store)) == {
        "inductor": "present",
        "triton": "present",
    }
    other = replace(KEY, model="another")
    assert restore(tmp_path / "c", store, other, wait_s=20.0).parts == {}


def test_of_many_publishers_of_a_key_one_wins_and_the_rest_leave_nothing(
    store: CacheStore, tmp_path: Path
) -> None:
    made = [
        publisher(compiled(tmp_path / str(i), inductor=f"kernel {i}".encode()), store)
        for i in range(6)
    ]
    barrier = threading.Barrier(len(made))
    found: list[str] = []

    def publish(one: Publisher) -> None:
        barrier.wait()
        found.extend(outcomes(one).values())

    threads = [threading.Thread(target=publish, args=(one,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["present"] * 5 + ["published"]
    restored = restore(tmp_path / "out", store, KEY, wait_s=20.0)
    assert restored.parts == {"inductor": 1}
    if isinstance(store, FolderStore):
        assert len(list((tmp_path / "store").iterdir())) == 2  # an archive and its manifest


def test_a_tampered_archive_leaves_a_cold_start(store: CacheStore, tmp_path: Path) -> None:
    publisher(compiled(tmp_path / "a", inductor=b"graph"), store).publish()
    manifest = store.find(f"{KEY.digest}-inductor")
    assert manifest is not None
    bad = b"\0" * manifest.size
    if isinstance(store, BucketStore):
        boto3.client("s3").put_object(Bucket="bucket", Key=f"caches/{manifest.archive}", Body=bad)
    else:
        (tmp_path / "store" / manifest.archive).write_bytes(bad)
    found = restore(tmp_path / "b", store, KEY, wait_s=20.0)
    assert found.parts == {}
    assert "BadArchive" in found.problems["inductor"]
    assert list((tmp_path / "b").iterdir()) == []


class Broken(FolderStore):
    """Fails, or hangs, at one verb."""

    def __init__(self, folder: Path, act: Callable[[], object], verb: str) -> None:
        super().__init__(folder)

        def broken(*arguments: object) -> None:
            act()

        setattr(self, verb, broken)


def full() -> None:
    raise DiskFull("no space")


@pytest.mark.parametrize("verb", ["find", "publish"])
def test_a_store_that_fails_is_an_outcome(verb: str, tmp_path: Path) -> None:
    root = compiled(tmp_path / "a", inductor=b"g", triton=b"t")
    reports = publisher(root, Broken(tmp_path / "s", full, verb)).publish()
    assert {r.outcome for r in reports} == {"failed"}
    assert all("no space" in (r.problem or "") for r in reports)
    assert not list(root.glob(".*"))


def test_a_local_disk_without_room_to_pack_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = compiled(tmp_path / "a", inductor=os.urandom(1 << 20))
    monkeypatch.setattr(publishing, "pack", lambda folder, to: pack(folder, Path("/dev/full")))
    (report,) = publisher(root, FolderStore(tmp_path / "s")).publish()
    assert (report.outcome, "no space" in (report.problem or "")) == ("failed", True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("verb", ["find", "fetch"])
def test_a_store_that_fails_or_hangs_is_a_cold_start(verb: str, tmp_path: Path) -> None:
    publisher(compiled(tmp_path / "a", inductor=b"g"), FolderStore(tmp_path / "s")).publish()
    failing = restore(tmp_path / "b", Broken(tmp_path / "s", full, verb), KEY, wait_s=20.0)
    assert failing.parts == {}
    assert "no space" in failing.problems["inductor"]
    let_go = threading.Event()
    hanging = restore(tmp_path / "c", Broken(tmp_path / "s", let_go.wait, verb), KEY, wait_s=0.2)
    let_go.set()
    assert (hanging.parts, "TimeoutError" in hanging.problems["inductor"]) == ({}, True)


def test_all_publishers_share_one_wait_and_no_more_than_told_are_at_work(tmp_path: Path) -> None:
    let_go, inside = threading.Event(), threading.Semaphore(0)
    most: list[int] = []
    now = [0]
    lock = threading.Lock()

    def hang() -> None:
        with lock:
            now[0] += 1
            most.append(now[0])
        inside.release()
        let_go.wait()
        with lock:
            now[0] -= 1

    root = compiled(tmp_path / "a", inductor=b"g", triton=b"t", sglang=b"s", deep_gemm=b"d")
    store = Broken(tmp_path / "s", hang, "find")
    began = time.monotonic()
    reports = publisher(root, store, wait_s=0.5, publishers=2).publish()
    waited_s = time.monotonic() - began
    assert {r.outcome for r in reports} == {"timed_out"}
    assert len(reports) == 4
    assert max(most) == 2
    assert waited_s >= 0.5  # one wait, however many parts: four of them would be two seconds
    let_go.set()


def test_a_cancelled_publisher_begins_nothing(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    root = compiled(tmp_path / "a", inductor=b"g")
    store = FolderStore(tmp_path / "s")
    assert outcomes(publisher(root, store, cancelled=cancelled)) == {"inductor": "cancelled"}
    assert store.find(f"{KEY.digest}-inductor") is None


def test_every_part_of_the_key_makes_another_key(tmp_path: Path) -> None:
    changes = [
        {"image": "x"}, {"machine": "x"}, {"versions": {}}, {"model": "x"}, {"layout": {}},
        {"engine": {"sglang": "1"}}, {"compilers": {"nvcc": "13"}}, {"archives": 1},
    ]  # fmt: skip
    digests = {KEY.digest, *(replace(KEY, **change).digest for change in changes)}  # type: ignore[arg-type]
    assert len(digests) == 9
    (tmp_path / "config.json").write_text("{}")
    here = key_of(tmp_path, {"ranks": 1})
    assert here == key_of(tmp_path, {"ranks": 1})
    assert here.versions["torch"]
    (tmp_path / "config.json").write_text('{"layers": 2}')
    assert key_of(tmp_path, {"ranks": 1}).digest != here.digest


def test_the_key_knows_the_versions_of_an_engine_in_an_environment_of_its_own(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    info = site / "sglang-0.5.99.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = key_of(tmp_path, {}, engine_python=str(python))
    assert found.engine["sglang"] == "0.5.99"
    assert found.digest != key_of(tmp_path, {}).digest
    with pytest.raises(FileNotFoundError):
        key_of(tmp_path, {}, engine_python=str(tmp_path / "gone"))


def test_the_key_knows_toolkit_and_variables_of_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    digests = {key_of(tmp_path, {}).digest}  # there is none
    for version in ("12.9", "13.0"):
        nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo release {version}\n')
        nvcc.chmod(0o755)
        found = key_of(tmp_path, {})
        assert version in found.compilers["nvcc"]
        digests.add(found.digest)
    for variable in ("FLASHINFER_CUDA_ARCH_LIST", "NVCC_APPEND_FLAGS", "CXX"):
        monkeypatch.setenv(variable, "another")
        digests.add(key_of(tmp_path, {}).digest)
    assert len(digests) == 6


def test_every_compiler_is_pointed_below_one_root(tmp_path: Path) -> None:
    told = environment(tmp_path)
    assert told.pop("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
    assert set(told) == {name for names in PARTS.values() for name in names}
    assert {Path(folder).parent for folder in told.values()} == {tmp_path}
