"""A card that never lands holds nobody up, and a campaign with nothing else left is over."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drill import campaign
from runtime.drill.campaign import Campaign
from runtime.drill.catalogue import Blow
from runtime.drill.checks import Verdict
from runtime.drill.deck import ROUNDS, TRIES, Deck


def test_a_card_that_missed_too_often_lets_the_others_go_first() -> None:
    deck = Deck(["rewind", "slow", "rewind", "drop"])
    for _ in range(TRIES - 1):
        deck.missed("rewind")
        assert deck.top == "rewind"
    deck.missed("rewind")
    assert deck.left == ("slow", "drop", "rewind", "rewind")


def test_a_card_is_given_up_only_where_none_of_its_name_lands() -> None:
    deck = Deck(["rewind", "rewind"])
    for _ in range(TRIES * ROUNDS - 1):
        deck.missed("rewind")
    assert deck
    deck.landed("rewind")
    deck.missed("rewind")
    assert deck
    for _ in range(TRIES * ROUNDS):
        deck.missed("rewind")
    assert not deck
    assert deck.left == ("rewind",)
    assert "rewind" in deck


@given(st.lists(st.sampled_from("abc"), max_size=12), st.randoms(use_true_random=False))
def test_a_deck_is_dealt_to_its_end_whatever_misses(cards: list[str], dice: random.Random) -> None:
    deck, dealt, tries = Deck(cards), list[str](), 0
    while deck:
        tries += 1
        card = deck.top
        if dice.random() < 0.3:
            deck.landed(card)
            dealt.append(card)
        else:
            deck.missed(card)
        assert sorted([*dealt, *deck.left]) == sorted(cards)
    assert tries <= (len(cards) + 3) * TRIES * ROUNDS


class Run:
    """A run that ends after so many blows or tries; it has no processes."""

    def __init__(self, job: object) -> None:
        self.observer, self.left = self, 4
        self.ports: set[int] = set()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_complete(self) -> bool:
        return self.left <= 0

    def wait(self, seconds: float) -> None:
        pass

    def until(self, is_so: Any, what: str) -> None:
        pass

    def first(self, since: float, *prefixes: str) -> float | None:
        return None


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every blow that was tried; a rewind never lands."""
    tried: list[str] = []

    def strike(run: Run, blow: Blow, *, patience_s: float) -> float | None:
        run.left -= 1
        tried.append(blow.name)
        return None if blow.name == "rewind" else 0.0

    well = Verdict(lost=0, doubled=0, orphans=0, problems=())
    monkeypatch.setattr(campaign, "strike", strike)
    monkeypatch.setattr(campaign, "DrilledRun", Run)
    monkeypatch.setattr(campaign, "make_ground", lambda folder: folder)
    monkeypatch.setattr(campaign, "examine", lambda *_, **__: well)
    monkeypatch.setattr(campaign, "read_rows", lambda _: ())
    return tried


@pytest.mark.parametrize("names", [["rewind"], ["rewind", "kill guard", "slow"]])
def test_a_campaign_ends_though_one_blow_meets_nobody(
    struck: list[str], tmp_path: Path, names: list[str]
) -> None:
    said: list[str] = []
    drill = Campaign(tmp_path, seed=1, say=said.append, names=names, variants=["ahead"])
    outcome = drill.run(20)
    assert struck.count("rewind") == TRIES * ROUNDS == outcome.unreached
    assert said[-1] == f"given up after {TRIES * ROUNDS} tries that met nobody: rewind"
    assert outcome.problems == []
    dealt = {taken.blow.name for taken in outcome.taken}
    assert dealt == {*names} - {"rewind"}


def test_no_time_is_left_for_a_blow_that_meets_nobody(struck: list[str], tmp_path: Path) -> None:
    drill = Campaign(tmp_path, seed=1, say=lambda _: None, names=["rewind"], variants=["ahead"])
    assert drill.run(20, within_s=0.0).unreached == 0
    assert struck == []
