"""The campaign: run after run of a short job, each brought to its end through random blows."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from runtime.drill.catalogue import WEIGHTS, Blow, at_point, deck, draw
from runtime.drill.checks import Measure, Verdict, examine, reached, redone, shared_folders
from runtime.drill.dealing import PATIENCE_S, strike
from runtime.drill.deck import ROUNDS, TRIES, Deck
from runtime.drill.drilled import IDLE_S, DrilledRun
from runtime.drill.job import LEASE_S, VARIANTS, Variant, make_ground, make_job
from runtime.drill.observing import Observer
from runtime.drill.places import FIRST, LAST
from runtime.drill.promises import broken
from runtime.errors import WaitTimeout
from runtime.rundir.chain import Chain
from runtime.rundir.journal import read_rows

_SOON_S = 8.0
"""An armed point that nobody reached by then is disarmed, and another blow is drawn."""
_CARD = "kill at a point"
_AGAIN = 0.85
"""Share of blows that are followed by another before the run has recovered."""
_VOLLEY = 8
_ON_THE_WAY = 0.6
"""Share of the points in a volley that lie on the way of a start."""
_WITHIN_S = 10.0
"""A following blow comes within this, so also while the next epoch is starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One blow and how the run took it.

    Seconds count from the blow; None where there was nothing to see: a slow passage is no failure.
    """

    blow: Blow
    run: int
    fired_at: float
    detected_s: float | None
    decided_s: float | None
    recovered_s: float | None


@dataclass(slots=True)
class Outcome:
    """Everything a campaign found."""

    seed: int
    taken: list[Taken] = field(default_factory=list[Taken])
    verdicts: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    """By run; 0 is the undisturbed one."""
    updates_redone: int = 0
    unreached: int = 0
    """Blows that met nobody in time: most of them points that no process came by."""

    @property
    def problems(self) -> list[str]:
        """What did not hold, run by run."""
        return [
            f"run {n}: {problem}"
            for n, verdict in self.verdicts.items()
            for problem in verdict.problems
        ]


class Campaign:
    """So many blows over as many runs as they need.

    Args:
        folder: where the runs lie; a run that held everything is deleted, another one is kept.
        seed: of all that is drawn. Which moment a blow meets depends on the machine all the same.
        say: told a line per blow and run.
        updates: of each run.
        blows_per_run: at most; a run that ends before them is followed by another.
        names: cards of the blows that are dealt, see ``catalogue.parse``.
        variants: of the runs, by turns.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        say: Callable[[str], None],
        updates: int = 60,
        blows_per_run: int = 25,
        names: Sequence[str] = tuple(WEIGHTS),
        variants: Sequence[Variant] = VARIANTS,
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._dice = random.Random(seed)
        self._say = say
        self._updates = updates
        self._blows_per_run = blows_per_run
        self._names = tuple(names)
        self._variants = tuple(variants)
        self._made = make_ground(folder)
        self._outcome = Outcome(seed=seed)
        self._measure: Measure | None = None
        self._until = math.inf

    def run(self, kills: int, *, within_s: float = math.inf) -> Outcome:
        """Deal ``kills`` blows, or as many as fall in a time; every run is brought to its end.

        A run that hangs is ended by force, kept, and counts as one that broke its promise. Blows
        that meet nobody, try after try, are given up: they break nothing.

        Raises:
            WaitTimeout: if the undisturbed run hangs.
        """
        if "deterministic" in self._variants:
            self._measure = self._undisturbed()
        cards = Deck(deck(self._dice, kills, self._names))
        number = 0
        self._until = time.monotonic() + within_s
        while cards and time.monotonic() < self._until:
            number += 1
            variant = self._variants[(number - 1) % len(self._variants)]
            verdict = self._one_run(number, variant, cards)
            self._outcome.verdicts[number] = verdict
            held = "all holds" if not verdict.problems else "; ".join(verdict.problems)
            self._say(f"run {number} ({variant}) ended: {held}")
            if not verdict.problems:
                shutil.rmtree(self._folder / str(number), ignore_errors=True)
        if cards.left and not cards:
            names = ", ".join(sorted({*cards.left}))
            self._say(f"given up after {TRIES * ROUNDS} tries that met nobody: {names}")
        return self._outcome

    def _undisturbed(self) -> Measure:
        job = make_job(self._folder / "undisturbed", self._made, "deterministic",
                       updates=self._updates)  # fmt: skip
        before = shared_folders()
        with DrilledRun(job) as run:
            run.until(run.observer.is_complete, "the undisturbed run to end")
            verdict = examine(job, measure=None, ports=run.ports, shared_before=before)
            measure = Measure.of(run.observer.records)
        self._outcome.verdicts[0] = verdict
        self._say(f"undisturbed: {len(measure.states)} states to compare with")
        return measure

    def _one_run(self, number: int, variant: Variant, left: Deck) -> Verdict:
        """One run from start to end; takes the cards of the blows it was dealt."""
        job = make_job(self._folder / str(number), self._made, variant, updates=self._updates)
        before = shared_folders()
        with DrilledRun(job) as run:
            try:
                self._through_blows(run, number, left)
            except WaitTimeout as error:
                found = (error.message, *broken(job, run.observer.records))
                return Verdict(lost=0, doubled=0, orphans=0, problems=found)
            verdict = examine(
                job,
                measure=self._measure if variant == "deterministic" else None,
                ports=run.ports,
                shared_before=before,
            )
            records = Chain(job.root).read()
            self._outcome.updates_redone += redone(
                records, reached(read_rows(job.root.pipeline_lifecycle))
            )
        return verdict

    def _through_blows(self, run: DrilledRun, number: int, left: Deck) -> None:
        """Deal a run its blows and bring it to its end.

        Raises:
            WaitTimeout: if it hangs, or comes to no commit any more.
        """
        # Some points lie only at the beginning, some only at the end of a run.
        self._told(run, number, self._on_the_way(run, FIRST, left))
        dealt = 0
        while (
            left
            and dealt < self._blows_per_run
            and time.monotonic() < self._until
            and not run.observer.is_complete()
        ):
            volley = self._volley(run, left)
            dealt += len(volley)
            self._told(run, number, volley)
        self._told(run, number, self._on_the_way(run, LAST, left))
        run.until(run.observer.is_complete, f"run {number} to end")

    def _on_the_way(
        self, run: DrilledRun, points: Sequence[str], left: Deck
    ) -> list[tuple[Blow, float]]:
        """Let whoever comes by one of these points die there, if such a card is left."""
        if _CARD not in left or run.observer.is_complete():
            return []
        blow = at_point(_CARD, self._dice.choice(points))
        fired_at = strike(run, blow, patience_s=IDLE_S)
        if fired_at is None:
            self._missed(left, _CARD)
            return []
        left.landed(_CARD)
        return [(blow, fired_at)]

    def _volley(self, run: DrilledRun, left: Deck) -> list[tuple[Blow, float]]:
        """Deal blows until one is waited for; takes their cards. Returns them with their times.

        A run must also stand a blow while it is still recovering from the one before.
        """
        volley: list[tuple[Blow, float]] = []
        while left and time.monotonic() < self._until and not run.observer.is_complete():
            card = left.top
            blow = draw(self._dice, card)
            is_soon = bool(volley)
            if is_soon and card == _CARD and self._dice.random() < _ON_THE_WAY:
                blow = at_point(_CARD, self._dice.choice(FIRST))
            run.wait(self._dice.uniform(0.0, _WITHIN_S) if is_soon else blow.wait_s)
            fired_at = strike(run, blow, patience_s=_SOON_S if is_soon else PATIENCE_S)
            if fired_at is None:
                self._missed(left, card)
                continue
            left.landed(card)
            volley.append((blow, fired_at))
            if self._dice.random() >= _AGAIN or len(volley) >= _VOLLEY:
                break
        return volley

    def _missed(self, left: Deck, card: str) -> None:
        self._outcome.unreached += 1
        left.missed(card)

    def _told(self, run: DrilledRun, number: int, volley: Sequence[tuple[Blow, float]]) -> None:
        """Wait until the run goes on, and note how it took each blow."""
        observer = run.observer
        run.until(
            lambda: (
                observer.is_complete()
                or all(recovered_at(observer, *blow) is not None for blow in volley)
            ),
            f"run {number} to recover from {', '.join(blow.name for blow, _ in volley)}",
        )
        for blow, fired_at in volley:
            taken = Taken(
                blow=blow,
                run=number,
                fired_at=fired_at,
                detected_s=_since(fired_at, observer.first(fired_at, "detected:")),
                decided_s=_since(fired_at, observer.first(fired_at, "decided:")),
                recovered_s=_since(fired_at, recovered_at(observer, blow, fired_at)),
            )
            self._outcome.taken.append(taken)
            self._say(_line(len(self._outcome.taken), taken))


def recovered_at(observer: Observer, blow: Blow, fired_at: float) -> float | None:
    """When a run first committed again after a blow; None until then."""
    since = fired_at
    if blow.ends_epoch:
        decided = observer.first(fired_at, "decided: epoch")
        # Who was killed may not have been of the owner's: a later commit will do then, too.
        since = decided or fired_at + 3 * LEASE_S
    return observer.first(since, "progress: commit", "progress: end")


def _since(start: float, then: float | None) -> float | None:
    return None if then is None else round(max(0.0, then - start), 3)


def _line(number: int, taken: Taken) -> str:
    return (
        f"{number:>3} run {taken.run}: {taken.blow.text}: detected {_text(taken.detected_s)}, "
        f"decided {_text(taken.decided_s)}, recovered {_text(taken.recovered_s)}"
    )


def _text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


@contextmanager
def drill_folder(keep: Path | None) -> Generator[Path]:
    """Where the runs of a drill lie: ``keep``, or a short temporary folder that goes when empty."""
    import tempfile

    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="mpdrill-"))
    yield folder
    shutil.rmtree(folder / "made", ignore_errors=True)
    shutil.rmtree(folder / "undisturbed", ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
