"""A library that a real ninja built, packed and brought up elsewhere."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from runtime.caches import ninja
from runtime.caches.archive import pack, unpack

BUILD = """\
rule cc
  command = compile $in $out && echo built >> {log}
build {folder}/k.so: cc {folder}/main.cpp
"""
# Beside the interpreter, as packages put it: that folder is on no PATH where pytest is run by path.
PLACES = (sysconfig.get_path("scripts"), *os.get_exec_path())
NINJA = shutil.which("ninja", path=os.pathsep.join(PLACES))
pytestmark = pytest.mark.skipif(NINJA is None, reason="no ninja (pip install -e '.[dev]')")


class Compiler:
    """As servers do it: writes its files where they differ, and lets ninja decide."""

    def __init__(self, tmp_path: Path) -> None:
        self.log = tmp_path / "built"
        ninja.write_guard(tmp_path / "bin")
        # Something else may come before it, and must not be lost on the way to the real one.
        (tmp_path / "tools").mkdir()
        (tmp_path / "tools" / "compile").symlink_to(shutil.which("cp") or "")
        places = (str(tmp_path / "tools"), str(tmp_path / "bin"), *PLACES)
        self.env = os.environ | {"PATH": os.pathsep.join(places)}

    def asks_for(self, folder: Path, *, rule: str = BUILD) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("main.cpp", "int one;"),
            (ninja.BUILD_FILE, rule.format(folder=folder, log=self.log)),
        ):
            if not (folder / name).exists() or (folder / name).read_text() != text:
                (folder / name).write_text(text)
        return self.says(["-v", "-C", str(folder), "-f", str(folder / ninja.BUILD_FILE)], folder)

    def says(self, words: list[str], at: Path) -> str:
        """What ninja answers to these words, in that folder."""
        done = subprocess.run(
            ["ninja", *(word.format(at=at) for word in words)],
            cwd=at, env=self.env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout

    def builds(self) -> int:
        return len(self.log.read_text().splitlines())


def test_what_was_built_is_not_built_again_where_it_is_restored(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    made, out = tmp_path / "one" / "part", tmp_path / "another" / "part"
    compiler.asks_for(made / "deep" / "k")
    assert "no work" in compiler.asks_for(made / "deep" / "k")
    packed = pack(made, tmp_path / "a")
    shutil.rmtree(made)
    out.parent.mkdir()
    unpack(packed.path, out, sha256=packed.sha256)
    assert compiler.builds() == 1

    assert "no work" in compiler.asks_for(out / "deep" / "k")
    assert compiler.builds() == 1
    # Archives are alike wherever they are made.
    assert pack(out, tmp_path / "b").sha256 == packed.sha256

    # The real ninja has its say where something else is asked for, or the library is damaged.
    compiler.asks_for(out / "deep" / "k", rule=BUILD.replace("compile ", "compile -f "))
    assert compiler.builds() == 2
    assert "no work" in compiler.asks_for(
        out / "deep" / "k", rule=BUILD.replace("compile ", "compile -f ")
    )


@pytest.fixture
def restored(tmp_path: Path) -> tuple[Compiler, Path]:
    """What came out of an archive, in a folder ``k`` below the one returned."""
    compiler = Compiler(tmp_path)
    compiler.asks_for(tmp_path / "in" / "k")
    packed = pack(tmp_path / "in", tmp_path / "a")
    shutil.rmtree(tmp_path / "in")
    unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    return compiler, tmp_path / "out"


@pytest.mark.parametrize(
    "words",
    [
        ["-C", "k"],
        ["-v", "-C", "{at}/k", "-j", "3"],
        ["-v", "-C", "{at}", "-f", "k/build.ninja"],
        ["-C", "{at}", "-f", "{at}/k/build.ninja", "-j3", "-k", "0"],
    ],
)
def test_all_of_a_marked_build_file_is_there_however_it_is_named(
    words: list[str], restored: tuple[Compiler, Path]
) -> None:
    compiler, at = restored
    assert "no work" in compiler.says(words, at)
    assert compiler.builds() == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-C", "k", "-f", "{at}/other.ninja"], "other"),
        (["-C", "k", "-f", "../k/../other.ninja"], "other"),
        (["-C", "k", "-t", "targets"], "k.so: cc"),
        (["-C", "k", "-n"], "compile"),
        (["-C", "k", "{at}/k/k.so"], "compile"),
        (["-vC", "k"], "compile"),
        (["-C", "k", "--version"], "1."),
    ],
)
def test_whoever_asks_for_anything_else_asks_the_real_one(
    words: list[str], says: str, restored: tuple[Compiler, Path]
) -> None:
    compiler, at = restored
    (at / "other.ninja").write_text("rule say\n  command = echo other\nbuild x: say\n")
    said = compiler.says(words, at)
    assert says in said
    assert "no work" not in said


def test_a_damaged_library_or_a_folder_without_one_is_built(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    compiler.asks_for(tmp_path / "in" / "k")
    compiler.asks_for(tmp_path / "in" / "bare")
    (tmp_path / "in" / "bare" / "k.so").unlink()
    packed = pack(tmp_path / "in", tmp_path / "a")
    unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    (tmp_path / "out" / "k" / "k.so").write_text("torn")
    for name in ("k", "bare"):
        compiler.asks_for(tmp_path / "out" / name)
        assert (tmp_path / "out" / name / "k.so").read_text() == "int one;"
    assert compiler.builds() == 4


@pytest.mark.parametrize("num_comments", [1, 1000])
def test_a_build_file_too_long_to_say_the_new_place_is_for_the_real_one(
    num_comments: int, tmp_path: Path
) -> None:
    comments = f"# {'x' * 100}\n" * num_comments
    compiler = Compiler(tmp_path)
    compiler.asks_for(tmp_path / "in" / "k", rule=BUILD + comments)
    packed = pack(tmp_path / "in", tmp_path / "a")
    unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    is_short = num_comments == 1
    told = (tmp_path / "out" / "k" / ninja.BUILD_FILE).read_text()
    assert (f"build {tmp_path}/out/k/k.so" in told) == is_short
    assert (tmp_path / "out" / "k" / ninja.MARK).exists() == is_short


def test_the_folder_itself_is_named_anew_and_its_neighbours_are_not(tmp_path: Path) -> None:
    told = "# {0} -I{0}: '{0}'; {0}/k {0}2 {0}.old {0}-x # {0}\n"
    compiler = Compiler(tmp_path)
    compiler.asks_for(tmp_path / "in" / "k", rule=BUILD + told.format(tmp_path / "in"))
    packed = pack(tmp_path / "in", tmp_path / "a")
    unpack(packed.path, tmp_path / "out", sha256=packed.sha256)
    out, others = str(tmp_path / "out"), f"{tmp_path}/in2 {tmp_path}/in.old {tmp_path}/in-x"
    expected = f"# {out} -I{out}: '{out}'; {out}/k {others} # {out}\n"
    assert (tmp_path / "out" / "k" / ninja.BUILD_FILE).read_text().endswith(expected)
