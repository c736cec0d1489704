"""Taking a step out of a protocol is noticed: otherwise the tests prove nothing about it."""

import pytest

from tests.faults.mutants import MUTANTS, is_caught, make


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant, tmp_path) -> None:
    make(mutant, tmp_path)
    caught, said = is_caught(mutant, tmp_path)
    assert caught, said
