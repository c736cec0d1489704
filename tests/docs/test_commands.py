"""Every command that a document shows exists, with the options it shows."""

import re
import shlex
from pathlib import Path

import pytest
import typer.testing

from flows.cli import build_app, command_modules

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
_BLOCK = re.compile(r"```(?:sh|bash|console)?\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`((?:milepost|make|python -m) [^`]+)`")


def shown(program: str) -> list[tuple[str, list[str]]]:
    """(document, words) of every command line of a program, in blocks and in running text."""
    found: list[tuple[str, list[str]]] = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
        for line in [*lines, *_INLINE.findall(text)]:
            line = line.split("  ")[0].split(" #")[0].strip()
            if line.startswith(f"{program} ") and "|" not in line and "{" not in line:
                found.append((document.name, shlex.split(line)))
    return found


def test_every_milepost_command_in_a_document_exists_with_its_options() -> None:
    commands = shown("milepost")
    assert len(commands) >= 8
    for document, words in commands:
        name = words[1]
        assert name in command_modules(), f"{document}: {' '.join(words)}"
        app = build_app([name])
        said = typer.testing.CliRunner().invoke(app, [name, "--help"])
        assert said.exit_code == 0
        for word in words[2:]:
            option = word.split("=")[0]
            assert not option.startswith("--") or option in said.output, f"{document}: {words}"


@pytest.mark.parametrize("program", ["make", "python -m"])
def test_every_target_and_module_in_a_document_exists(program: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = shown(program)
    assert found
    for document, words in found:
        if program == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{document}: {words}"
        else:
            path = ROOT / words[2].replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), words


def test_what_a_target_writes_lies_where_git_looks_away() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    written = re.findall(r"--out[= ](\S+)", makefile)
    assert written
    assert [place for place in written if f"{place.split('/')[0]}/" not in ignored] == []
