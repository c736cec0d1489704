"""What a drill draws can happen, happens in every kind, and follows from the seed."""

import fnmatch
import random
from collections import Counter

import pytest

from runtime.drill.catalogue import ROLES, WEIGHTS, at_point, deck, draw, parse
from runtime.drill.places import FIRST, LAST, POINTS_OF
from runtime.faults.plan import Kind
from runtime.faults.points import FILE_POINTS, POINTS

NAMES = {point.name for point in POINTS}
FILES = {point.name.partition(".")[2] for point in FILE_POINTS} | {"rmdir"}


def is_listed(point: str) -> bool:
    return point in NAMES or point.partition(".")[2] in FILES


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_blow_is_whole(name: str) -> None:
    dice = random.Random(name)
    for _ in range(200):
        blow = draw(dice, name)
        assert blow.name == name
        if blow.point:
            assert is_listed(blow.point), blow
            assert blow.kind is not Kind.SLOW or blow.seconds
        else:
            assert blow.role in (*ROLES, "owner")


@pytest.mark.parametrize("name", POINTS_OF)
def test_a_blow_can_be_had_at_any_of_its_points(name: str) -> None:
    dice = random.Random(name)
    for _ in range(50):
        assert draw(dice, name).point in POINTS_OF[name]
    for point in POINTS_OF[name]:
        blow = draw(dice, f"{name.removesuffix(' at a point')} at {point}")
        assert (blow.name, blow.point) == (name, point)
        assert parse(blow.text) == (name, point)
        assert deck(dice, 3, [blow.text]) == [blow.text] * 3


@pytest.mark.parametrize(
    "card", ["kill", "kill at", "kill at nowhere", "drop at commit.record", ""]
)
def test_a_blow_that_cannot_be_is_refused(card: str) -> None:
    with pytest.raises(ValueError, match="no blow is called"):
        draw(random.Random(1), card)


@pytest.mark.parametrize("point", [*FIRST, *LAST])
def test_points_on_the_way_are_points(point: str) -> None:
    assert is_listed(at_point("kill at a point", point).point)


def test_points_of_every_room_are_drawn() -> None:
    dice = random.Random(1)
    drawn = [draw(dice, "kill at a point").point for _ in range(3000)]
    rooms = ("producer", "generation", "gate", "session", "commit", "guard", "publication",
             "engine", "chain", "ledger")  # fmt: skip
    assert all(fnmatch.filter(drawn, f"{room}.*") for room in rooms)


def test_a_hundred_blows_are_of_every_kind_and_follow_from_the_seed() -> None:
    cards = deck(random.Random(1), 100)
    assert len(cards) == 100
    assert Counter(cards).keys() == WEIGHTS.keys()
    assert cards == deck(random.Random(1), 100)
    assert cards != deck(random.Random(2), 100)
    assert set(deck(random.Random(1), 9, ["kill guard", "slow"])) == {"kill guard", "slow"}
