"""The mutants of `make mutants` can still be made: each changes what stands in the code today."""

import ast
import random

import pytest

from runtime.drill.catalogue import deck, draw
from tests.faults.drilled import DRILLS
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_has_a_drill_whose_first_blow_falls_where_it_is_meant(mutant) -> None:
    drill = DRILLS[mutant.name]
    dice = random.Random(drill.seed)
    blow = draw(dice, deck(dice, drill.kills, [drill.card])[0])
    assert blow.text == drill.card
    # Commit 0 is a single file: nothing would be left to restore if that one were torn.
    assert blow.after > 0 or not blow.point.startswith("commit.")
