"""The mutants of `make mutants` can still be made: each changes what stands in the code today."""

import ast

import pytest

from tests.faults.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_can_be_made_and_would_run(mutant) -> None:
    changed: dict[str, str] = {}
    for name, old, new in mutant.edits:
        text = changed.get(name, (ROOT / name).read_text())
        assert text.count(old) == 1, old
        changed[name] = text.replace(old, new)
    for text in changed.values():
        ast.parse(text)
    for test in mutant.caught_by:
        file, _, function = test.partition("::")
        assert function in (ROOT / file).read_text()
