import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.caches import archive
from runtime.caches.archive import BadArchive, pack, unpack
from runtime.checkpoints.files import digest
from runtime.errors import DiskFull

NAMES = st.text("abcxyz0.-_", min_size=1, max_size=12).filter(lambda n: n.strip(".") != "")


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@settings(max_examples=25)
@given(
    files=st.dictionaries(st.tuples(NAMES, NAMES).map("/".join), st.binary(max_size=200)),
)
def test_what_goes_in_comes_out_and_equal_folders_are_equal_bytes(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = tmp_path_factory.mktemp("packed")
    for name in ("one", "two"):
        fill(at / name, files)
        (at / name).mkdir(exist_ok=True)
    for path in (at / "two").rglob("*"):
        os.utime(path, (1, 1))
    first = pack(at / "one", at / "one.tar.zst")
    second = pack(at / "two", at / "two.tar.zst")
    assert first.sha256 == second.sha256 == digest(first.path)
    assert unpack(first.path, at / "out", sha256=first.sha256) == len(files) == first.num_files
    assert tree(at / "out") == files


@pytest.mark.parametrize("name", ["plain", 'with \u00e9 and "quotes"'])
def test_a_list_of_files_names_them_where_they_come_out(name: str, tmp_path: Path) -> None:
    """As Triton writes it: what the list names and is not there is compiled again."""
    made, out = tmp_path / name, tmp_path / "elsewhere" / name
    here = {"k.json": str(made / "KEY" / "k.json"), "k.cubin": str(made / "KEY" / "k.cubin")}
    group = json.dumps({"child_paths": here}).encode()
    about_others = json.dumps({"child_paths": {"x": f"{made}er/x"}}).encode()
    code = b"\x7fELF" + str(made).encode() + b"/KEY"
    fill(
        made,
        {"KEY/__grp__k.json": group, "KEY/k.json": b"{}", "KEY/k.cubin": code,
         "OTHER/__grp__x.json": about_others},
    )  # fmt: skip
    packed = pack(made, tmp_path / "a")
    shutil.rmtree(made)
    out.parent.mkdir()
    unpack(packed.path, out, sha256=packed.sha256)
    found = json.loads((out / "KEY/__grp__k.json").read_text())["child_paths"]
    assert set(found) == set(here)
    assert [Path(path).read_bytes() for path in found.values()] == [b"{}", code]
    assert (out / "OTHER/__grp__x.json").read_bytes() == about_others
    # Where it lay is no part of what it is.
    assert pack(out, tmp_path / "b").sha256 == packed.sha256


def test_a_link_stays_out_and_what_runs_still_runs(tmp_path: Path) -> None:
    fill(tmp_path / "in", {"kernel.so": b"code", "plain": b"data"})
    (tmp_path / "in" / "kernel.so").chmod(0o755)
    (tmp_path / "in" / "link").symlink_to("/etc/passwd")
    packed = pack(tmp_path / "in", tmp_path / "a")
    unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    assert set(tree(tmp_path / "out")) == {"kernel.so", "plain"}
    assert (tmp_path / "out" / "kernel.so").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "out" / "plain").stat().st_mode & 0o777 == 0o600


def evil(path: Path, member: tarfile.TarInfo, content: bytes = b"x") -> str:
    with (
        pa.CompressedOutputStream(str(path), "zstd") as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        good = tarfile.TarInfo("good")
        good.size = 4
        tar.addfile(good, io.BytesIO(b"good"))
        member.size = len(content) if member.isreg() else 0
        tar.addfile(member, io.BytesIO(content))
    return digest(path)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    "tampered",
    [
        member("../outside"),
        member("a/../../outside"),
        member("/tmp/outside"),
        member("link", tarfile.SYMTYPE, "/etc"),
        member("hard", tarfile.LNKTYPE, "good"),
        member("pipe", tarfile.FIFOTYPE),
        member("device", tarfile.CHRTYPE),
        member("disk", tarfile.BLKTYPE),
        member("folder", tarfile.DIRTYPE),
        member("sparse", tarfile.GNUTYPE_SPARSE),
        member("good"),
        member("good/below"),
        member(".restored"),
        member("k/.restored"),
        member("."),
    ],
    ids=lambda m: f"{m.name}-{m.type!r}",
)
def test_an_archive_with_anything_but_plain_files_inside_leaves_nothing(
    tampered: tarfile.TarInfo, tmp_path: Path
) -> None:
    (tmp_path / "at").mkdir()
    sha256 = evil(tmp_path / "a", tampered)
    with pytest.raises(BadArchive):
        unpack(tmp_path / "a", tmp_path / "at" / "out", sha256=sha256)
    assert {p.name for p in tmp_path.rglob("*")} == {"at", "a"}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_would_fill_the_memory_is_not_read(kind: bytes, tmp_path: Path) -> None:
    header = member("long", kind)
    header.size = 1 << 30
    with pa.CompressedOutputStream(str(tmp_path / "a"), "zstd") as stream:
        stream.write(header.tobuf())
    with pytest.raises(BadArchive, match="no business"):
        unpack(tmp_path / "a", tmp_path / "out", sha256=digest(tmp_path / "a"))
    assert not (tmp_path / "out").exists()


def test_long_names_are_no_such_header(tmp_path: Path) -> None:
    files = {"/".join(["d" * 100] * 5 + ["\u00e9"]): b"x"}
    fill(tmp_path / "in", files)
    packed = pack(tmp_path / "in", tmp_path / "a")
    unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    assert tree(tmp_path / "out") == files


def test_what_grows_out_of_all_proportion_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "in", {"zeros": bytes(4 << 20)})
    packed = pack(tmp_path / "in", tmp_path / "a")
    assert unpack(packed.path, tmp_path / "small", sha256=packed.sha256) == 1
    monkeypatch.setattr(archive, "FREE_BYTES", 1 << 20)
    with pytest.raises(BadArchive, match="bytes"):
        unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    assert not (tmp_path / "out").exists()


def test_a_changed_byte_is_seen_before_anything_is_read(tmp_path: Path) -> None:
    fill(tmp_path / "in", {"f": b"content" * 100})
    packed = pack(tmp_path / "in", tmp_path / "a")
    data = bytearray(packed.path.read_bytes())
    data[len(data) // 2] ^= 1
    packed.path.write_bytes(data)
    with pytest.raises(BadArchive, match="sha256"):
        unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [0, 10, -4])
def test_a_torn_archive_with_a_digest_of_its_own_leaves_nothing(cut: int, tmp_path: Path) -> None:
    fill(tmp_path / "in", {"f": os.urandom(5000)})
    packed = pack(tmp_path / "in", tmp_path / "a")
    packed.path.write_bytes(packed.path.read_bytes()[:cut] if cut else b"")
    with pytest.raises(BadArchive):
        unpack(packed.path, tmp_path / "out", sha256=digest(packed.path))
    assert not (tmp_path / "out").exists()


def test_more_than_a_cache_can_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "in", {"f": b"x" * 2000})
    packed = pack(tmp_path / "in", tmp_path / "a")
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with pytest.raises(BadArchive, match="bytes"):
        unpack(packed.path, tmp_path / "out", sha256=packed.sha256)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    fill(tmp_path / "in", {"f": os.urandom(1 << 20)})
    with pytest.raises(DiskFull):
        pack(tmp_path / "in", Path("/dev/full"))
