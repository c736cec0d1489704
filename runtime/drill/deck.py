"""The cards of a campaign that are still to be dealt, and what becomes of one that never lands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

TRIES = 3
"""After so many in vain a card goes to the end of the deck."""
ROUNDS = 2
"""After so many times to the end it is given up, until another one of its name lands."""


class Deck:
    """True while there is a card left that is not given up.

    Args:
        cards: in the order in which they are dealt.
    """

    def __init__(self, cards: Iterable[str]) -> None:
        self._cards = list(cards)
        self._misses: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return any(not self._is_given_up(card) for card in self._cards)

    def __contains__(self, card: str) -> bool:
        return card in self._cards

    @property
    def top(self) -> str:
        """The card that is next; IndexError where none is left."""
        return self._cards[0]

    @property
    def left(self) -> tuple[str, ...]:
        """What was not dealt, given up or not."""
        return tuple(self._cards)

    def landed(self, card: str) -> None:
        """Take one card of this name out.

        Raises:
            ValueError: if there is none.
        """
        self._cards.remove(card)
        del self._misses[card]

    def missed(self, card: str) -> None:
        """Note that one of this name met nobody, and let others go first if that was too often."""
        self._misses[card] += 1
        if self._misses[card] % TRIES == 0:
            same = [each for each in self._cards if each == card]
            self._cards = [each for each in self._cards if each != card] + same

    def _is_given_up(self, card: str) -> bool:
        return self._misses[card] >= TRIES * ROUNDS
