"""What is wrong with a run file, one `Problem` each, all in one error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a run file, and what would be right."""

    file: str
    """The run file, or ``--set``."""
    line: int | None
    """Line in the file, from 1; None where the file has no such line."""
    field: str
    """Dotted: ``core.lr``. Empty where the file as a whole is meant."""
    value: str | None
    """What stands there, as TOML would write it; None where nothing does. Never a secret."""
    message: str
    allowed: str | None = None
    """What may stand there; None where the message says it."""
    nearest: str | None = None
    """Known name at most two edits away."""

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        parts = [f"{where}: {self.field or 'run file'}"]
        if self.value is not None:
            parts[0] += f" = {self.value}"
        parts.append(self.message)
        text = ": ".join(parts)
        if self.nearest is not None:
            text += f"; did you mean {self.nearest}?"
        if self.allowed is not None:
            text += f"\n    allowed: {self.allowed}"
        return text

    def as_json(self) -> dict[str, str | int | None]:
        """All fields, for ``--json``."""
        return asdict(self)


class RunFileError(Exception):
    """A run file that describes no run. Holds every problem, in order of line.

    Attributes:
        problems: at least one.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.file, p.line or 0))
        super().__init__("\n".join(map(str, self.problems)))


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name with the smallest edit distance to ``name``, when that is at most 2.

    Neighbouring letters swapped count as one edit. Ties go to the name that comes first. A name of
    three letters or less needs to be within 1, since any two short names are 2 apart.
    """
    limit = 2 if len(name) > 3 else 1
    best: tuple[int, str] | None = None
    for candidate in known:
        if abs(len(candidate) - len(name)) > limit:
            continue
        distance = edit_distance(name, candidate)
        if distance <= limit and (best is None or distance < best[0]):
            best = (distance, candidate)
    return None if best is None else best[1]


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn ``a`` into ``b``.

    Source: optimal string alignment, the restricted Damerau-Levenshtein distance.
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, start=1):
        above, row = row, [i]
        for j, other in enumerate(b, start=1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (char != other))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before = above
    return row[-1]
