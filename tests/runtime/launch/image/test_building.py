"""Images of a commit, in a real registry on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.testing

pytest.importorskip("oras", reason="pip install -e '.[launch]'")

from configs.runtime_lock import LOCK_FILE, LockedBase, read_lock
from flows.cli import build_app
from runtime.errors import ConfigError, CredentialsRefused, DirtyCheckout, ServiceUnavailable
from runtime.launch.image.building import build_image, inspect_image, lock_of
from runtime.launch.image.buildkit import BuildKit
from runtime.launch.image.overlay import SOURCE_ROOT
from runtime.launch.image.protocol import ImageKey, Where
from runtime.launch.image.reference import ImageReference
from runtime.launch.image.source import Checkout
from tests.runtime.launch.image import registries
from tests.runtime.launch.image.registries import Registry, put_base

_missing = registries.missing_tools("docker-registry", "busybox", "git")
pytestmark = pytest.mark.skipif(_missing is not None, reason=_missing or "")
LONG = "a-long-folder-name/" * 6 + "é-file.py"


def git(folder: Path, *arguments: str, **environ: str) -> str:
    identity = {
        "GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@t", "GIT_AUTHOR_DATE": "2024-05-01T10:00:00Z",
        "GIT_COMMITTER_DATE": "2024-05-01T10:00:00Z",
    }  # fmt: skip
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, **identity, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def lock(base: str) -> str:
    return json.dumps(
        {
            "base": {"reference": base},
            "platform": "linux/amd64",
            "packages": {},
            "features": ["sglang", "flash_3"],
            "entry_points": {"guard": "runtime.session.guard"},
        }
    )


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


def make_checkout(folder: Path, base: str) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "configs").mkdir()
    (folder / "configs" / "runtime.lock.json").write_text(lock(base))
    (folder / ".gitignore").write_text("runs/\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho it runs\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    path = folder / LONG
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    return folder


@pytest.fixture
def checkout(tmp_path: Path, registry: Registry) -> Path:
    digest = put_base(registry.address, "runtime/base")
    return make_checkout(tmp_path / "one", f"{registry.address}/runtime/base@{digest}")


def test_two_clones_give_one_digest_and_the_second_build_is_reused(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    target = f"{registry.address}/team/{tmp_path.name}"
    first = build_image(target, checkout=checkout)
    assert (first.how, first.mounted, first.moved) == ("built", 1, 0)
    clone = tmp_path / "two"
    before = os.umask(0o077)
    try:
        git(tmp_path, "clone", "-q", "-c", "core.autocrlf=true", str(checkout), str(clone))
    finally:
        os.umask(before)
    (clone / "runs").mkdir()
    (clone / "runs" / "ignored").write_text("never enters an image")
    again = build_image(target, checkout=clone / "configs")
    assert (again.image, again.how) == (first.image, "reused")
    elsewhere = build_image(f"{registry.address}/other/{tmp_path.name}", checkout=clone)
    assert elsewhere.how == "built"
    assert elsewhere.image.rpartition("@")[2] == first.image.rpartition("@")[2]


def test_another_commit_or_lock_is_another_image(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    target = f"{registry.address}/team/{tmp_path.name}"
    images = {build_image(target, checkout=checkout).image}
    (checkout / "new.py").write_text("y = 2\n")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "two")
    images.add(build_image(target, checkout=checkout).image)
    path = checkout / "configs" / "runtime.lock.json"
    changed = json.loads(path.read_text()) | {"features": ["sglang"]}
    path.write_text(json.dumps(changed))
    git(checkout, "commit", "-q", "-am", "three")
    images.add(build_image(target, checkout=checkout).image)
    assert len(images) == 3


@pytest.mark.parametrize("how", ["changed", "untracked", "staged", "deleted"])
def test_a_dirty_tree_is_refused_and_nothing_is_sent(
    checkout: Path, registry: Registry, tmp_path: Path, how: str
) -> None:
    target = f"{registry.address}/team/{tmp_path.name}"
    if how == "untracked":
        (checkout / "note.txt").write_text("mine")
    elif how == "deleted":
        (checkout / "link").unlink()
    else:
        (checkout / "run.sh").write_text("other\n")
        if how == "staged":
            git(checkout, "add", "-A")
    with pytest.raises(DirtyCheckout, match=r"note\.txt|run\.sh|link"):
        build_image(target, checkout=checkout)
    answer = registry.session().get(
        f"http://{registry.address}/v2/team/{tmp_path.name}/tags/list", timeout=10
    )
    assert answer.status_code == 404


def test_labels_say_what_the_image_is_and_a_moved_tag_is_not_believed(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    target = f"{registry.address}/team/{tmp_path.name}"
    built = build_image(target, checkout=checkout)
    labels = inspect_image(built.image)
    assert labels.revision == git(checkout, "rev-parse", "HEAD") == built.revision
    assert labels.lock_digest == built.lock_digest
    assert labels.base_digest == built.base.rpartition("@")[2]
    assert labels.features == ("flash_3", "sglang")
    assert labels.entry_points == {"guard": "runtime.session.guard"}
    assert labels.builder == "registry-overlay/1"
    # Somebody moves our tag to the base: the digest decides, and the tag is put back.
    url = f"http://{registry.address}/v2/team/{tmp_path.name}/manifests"
    session = registry.session()
    base = session.get(
        f"http://{registry.address}/v2/runtime/base/manifests/latest",
        headers={"Accept": registries.OCI["manifest"]},
        timeout=10,
    )
    for blob in (base.json()["config"], *base.json()["layers"]):
        session.post(
            f"http://{registry.address}/v2/team/{tmp_path.name}/blobs/uploads/",
            params={"mount": blob["digest"], "from": "runtime/base"},
            timeout=10,
        )
    moved = session.put(
        f"{url}/{built.tag}",
        data=base.content,
        headers={"Content-Type": registries.OCI["manifest"]},
        timeout=10,
    )
    assert moved.status_code == 201
    again = build_image(target, checkout=checkout)
    assert (again.image, again.how) == (built.image, "reused")
    head = session.head(
        f"{url}/{built.tag}", headers={"Accept": registries.OCI["manifest"]}, timeout=10
    )
    assert head.headers["Docker-Content-Digest"] == built.image.rpartition("@")[2]
    with pytest.raises(ConfigError, match="was not built by"):
        inspect_image(f"{target}@{registries.sha256(base.content)}")


@pytest.mark.parametrize("kind", ["docker", "index"])
def test_bases_of_other_kinds(registry: Registry, tmp_path: Path, kind: str) -> None:
    digest = put_base(
        registry.address,
        f"runtime/{kind}",
        types=registries.DOCKER if kind == "docker" else registries.OCI,
        as_index=kind == "index",
    )
    checkout = make_checkout(tmp_path / "c", f"{registry.address}/runtime/{kind}@{digest}")
    built = build_image(f"{registry.address}/team/{tmp_path.name}", checkout=checkout)
    assert inspect_image(built.image).base_digest == digest
    assert_unpacks_to_the_tree(built.image, checkout, tmp_path)


def test_the_image_unpacks_to_the_committed_tree(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    built = build_image(f"{registry.address}/team/{tmp_path.name}", checkout=checkout)
    rootfs = assert_unpacks_to_the_tree(built.image, checkout, tmp_path)
    if os.geteuid() == 0:
        said = subprocess.run(
            ["chroot", str(rootfs), "/bin/sh", "-c", f"cd /{SOURCE_ROOT} && ./link"],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/bin:/usr/sbin:/usr/bin"},
        )
        assert said.stdout == "it runs\n"


def assert_unpacks_to_the_tree(image: str, checkout: Path, tmp_path: Path) -> Path:
    if reason := registries.missing_tools("skopeo", "umoci"):
        pytest.skip(reason)
    layout, bundle = tmp_path / "layout", tmp_path / "bundle"
    subprocess.run(
        ["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{image}", f"oci:{layout}:x"],
        check=True,
    )
    unpack = ["umoci", "unpack", *([] if os.geteuid() == 0 else ["--rootless"])]
    subprocess.run(
        [*unpack, "--image", f"{layout}:x", str(bundle)], check=True, capture_output=True
    )
    tree = bundle / "rootfs" / SOURCE_ROOT
    wanted = tmp_path / "wanted"
    git(checkout, "worktree", "add", "-q", "--detach", str(wanted))
    (wanted / ".git").unlink()
    assert contents(tree) == contents(wanted)
    assert LONG in contents(tree)
    shutil.rmtree(wanted)
    return bundle / "rootfs"


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), bool(path.stat().st_mode & 0o100))
        else:
            found[name] = ("folder",)
    return found


@pytest.mark.parametrize("kind", ["basic", "token"])
def test_registries_that_want_a_login(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bcrypt" if kind == "basic" else "jwt")
    with registries.running(tmp_path / "r", kind) as registry:
        environ = registries.login(tmp_path / "docker", registry.address)
        digest = put_base(registry.address, "runtime/base", environ=environ)
        checkout = make_checkout(tmp_path / "c", f"{registry.address}/runtime/base@{digest}")
        target = f"{registry.address}/team/app"
        built = build_image(target, checkout=checkout, environ=environ)
        assert (built.how, built.mounted) == ("built", 1)
        assert build_image(target, checkout=checkout, environ=environ).how == "reused"
        if kind == "token":
            assert "repository:runtime/base:pull" in registry.scopes
            assert "repository:team/app:pull,push" in registry.scopes
        wrong = registries.login(tmp_path / "wrong", registry.address, "not it")
        for refused in (wrong, {"DOCKER_CONFIG": str(tmp_path / "none")}):
            with pytest.raises(CredentialsRefused):
                build_image(target, checkout=checkout, environ=refused)


def test_a_base_on_another_registry_is_moved_and_gives_the_same_digest(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    here = build_image(f"{registry.address}/team/{tmp_path.name}", checkout=checkout)
    with registries.running(tmp_path / "r") as other:
        there = build_image(f"{other.address}/team/app", checkout=checkout)
        assert (there.how, there.mounted, there.moved) == ("built", 0, 1)
        assert there.image.rpartition("@")[2] == here.image.rpartition("@")[2]
        assert_unpacks_to_the_tree(there.image, checkout, tmp_path)


def test_a_local_copy_of_the_base_must_be_the_locked_one(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    target = f"{registry.address}/team/{tmp_path.name}"
    copy = put_base(registry.address, "mirror/base")
    other = put_base(registry.address, "mirror/other", types=registries.DOCKER)
    named = {"MILEPOST_BASE_IMAGE": f"{registry.address}/mirror/base:latest"}
    assert build_image(target, checkout=checkout, environ=named).base.endswith(
        f"mirror/base@{copy}"
    )
    named = {"MILEPOST_BASE_IMAGE": f"{registry.address}/mirror/other@{other}"}
    with pytest.raises(ConfigError, match="the lock names"):
        build_image(target, checkout=checkout, environ=named)


def test_no_base_no_registry_no_repository(checkout: Path, registry: Registry) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listened on: connections are refused
        closed = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceUnavailable, match=closed):
            build_image(f"{closed}/team/app", checkout=checkout)
    with pytest.raises(ConfigError, match="no image"):
        build_image("team/app", checkout=checkout)
    path = checkout / "configs" / "runtime.lock.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base": None}))
    git(checkout, "commit", "-q", "-am", "no base")
    with pytest.raises(ConfigError, match="names no base to build on"):
        build_image(f"{registry.address}/team/app", checkout=checkout)


def test_from_the_lock_without_a_base_to_an_image_by_the_command_line(
    checkout: Path, registry: Registry
) -> None:
    path = checkout / "configs" / "runtime.lock.json"
    path.write_text(LOCK_FILE.read_text())  # as it comes
    git(checkout, "commit", "-q", "-am", "the lock as it comes")
    target = f"{registry.address}/team/first"
    code, said = milepost("build", target, "--checkout", str(checkout))
    assert (code, "milepost image lock" in said) == (1, True)
    digest = put_base(registry.address, "runtime/first")
    base = f"{registry.address}/runtime/first@{digest}"
    assert milepost("lock", base, "--checkout", str(checkout))[0] == 0
    assert lock_of(checkout).model_copy(update={"base": None}) == read_lock()
    # What was locked is a change like any other: it is committed first.
    code, said = milepost("build", target, "--checkout", str(checkout))
    assert (code, "runtime.lock.json" in said) == (1, True)
    git(checkout, "commit", "-q", "-am", "lock a base")
    first, second = (milepost("build", target, "--checkout", str(checkout))[1] for _ in range(2))
    assert (first.split(":")[0], second.split(":")[0]) == ("built", "reused")
    image = first.splitlines()[0].partition(": ")[2]
    assert inspect_image(image).base_digest == digest
    # Locked again it keeps the id that it has at a scheduler; another base has not that id.
    known = json.loads(path.read_text())
    known["base"]["beaker"] = "01J9ZK8Q2V7N4R5T6W8XY0ABCD"
    path.write_text(json.dumps(known))
    for name, beaker in (("first", known["base"]["beaker"]), ("other", None)):
        same = f"{registry.address}/runtime/{name}@{put_base(registry.address, f'runtime/{name}')}"
        assert milepost("lock", same, "--checkout", str(checkout))[0] == 0
        assert lock_of(checkout).base == LockedBase(reference=same, beaker=beaker)


def milepost(*arguments: str) -> tuple[int, str]:
    """Exit status and all that ``milepost image`` said."""
    told = typer.testing.CliRunner().invoke(build_app(["image"]), ["image", *arguments])
    return told.exit_code, told.output


def test_buildkit_is_asked_for_a_reproducible_image_and_believed_by_its_metadata(
    checkout: Path, registry: Registry, tmp_path: Path
) -> None:
    """A command in BuildKit's place notes what it was given and answers as BuildKit does."""
    target = ImageReference.parse(f"{registry.address}/team/{tmp_path.name}")
    tree = Checkout(checkout)
    lock = lock_of(checkout)
    key = ImageKey(revision=tree.clean_revision(), lock=lock)
    assert lock.base is not None
    base = ImageReference.parse(lock.base.reference)
    noting = tmp_path / "buildx.py"
    noting.write_text(
        "import json, os, pathlib, sys\n"
        "given = dict(a[2:].split('=', 1) for a in sys.argv[1:] if a.startswith('--'))\n"
        "folder = pathlib.Path(sys.argv[-1])\n"
        "files = sorted(str(p.relative_to(folder)) for p in (folder / 'tree').iterdir())\n"
        f"pathlib.Path({str(tmp_path / 'seen.json')!r}).write_text(json.dumps("
        "[sys.argv[1:], os.environ['SOURCE_DATE_EPOCH'], files,"
        " (folder / 'Dockerfile').read_text()]"
        "))\n"
        "pathlib.Path(given['metadata-file']).write_text("
        "json.dumps({'containerimage.digest': 'sha256:' + 'ab' * 32}))\n"
    )
    builder = BuildKit(Where(base=base, target=target), command=(sys.executable, str(noting)))
    built = builder.build(key, tree)
    assert (built.how, str(built.image)) == ("built", f"{target}@sha256:{'ab' * 32}")
    argv, epoch, files, dockerfile = json.loads((tmp_path / "seen.json").read_text())
    assert epoch == str(key.revision.time) == "1714557600"
    assert files == sorted(["tree/.gitignore", "tree/configs", "tree/link", "tree/run.sh",
                            f"tree/{LONG.partition('/')[0]}"])  # fmt: skip
    assert f"COPY tree/ /{SOURCE_ROOT}/" in dockerfile
    assert f"--build-arg=BASE={lock.base.reference}" in argv
    assert f"--label=org.opencontainers.image.revision={key.revision.commit}" in argv
    assert f"--label=milepost.lock.digest={lock.digest}" in argv
    assert {"--provenance=false", "--platform=linux/amd64"} <= set(argv)
    (output,) = [a for a in argv if a.startswith("--output=")]
    assert f"name={target}:{key.tag}" in output
    assert "rewrite-timestamp=true" in output
    # The registry's own builder made that image already: its labels count, not who built it.
    overlay = build_image(str(target), checkout=checkout)
    reused = builder.build(key, tree)
    assert (reused.how, str(reused.image)) == ("reused", overlay.image)
