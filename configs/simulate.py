"""A queue of groups between engines and trainer, simulated: what staleness and waiting to expect.

Assumptions, stated with the result: a collection trains in one unit of time; a response takes a
log-normal time, a group the longest of its samples; serving never slows down with load; publication
and evaluation take none; data does not end.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from configs.concurrency import settle_concurrency
from configs.run import RunSpec

RATIOS = (0.5, 1.0, 2.0)
"""Generation time of a collection over its training time."""
_SPREAD = 0.6
_COLLECTIONS = 60
_WARM_UP = 10
_MAX_GROUPS = 60_000


class QueueRow(BaseModel):
    """One ratio of generation to training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation_over_training: float
    mean_staleness: float
    max_staleness: int
    regenerated_share: float
    """Groups cancelled because they grew too old, over groups trained on."""
    trainer_wait_share: float
    """Share of the time in which the trainer has no collection."""
    serving_occupancy: float
    """Mean share of the serving slots in use."""


class QueueSimulation(BaseModel):
    """All ratios."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: list[QueueRow]
    assumptions: list[str]

    def lines(self) -> Iterator[str]:
        """A table for a person."""
        yield "\nsimulation"
        yield "  generation/training  staleness mean  max  regenerated  trainer waits  slots busy"
        for row in self.rows:
            yield (
                f"  {row.generation_over_training:>19.1f}  {row.mean_staleness:>14.1f}  "
                f"{row.max_staleness:>3}  {row.regenerated_share:>11.0%}  "
                f"{row.trainer_wait_share:>13.0%}  "
                f"{row.serving_occupancy:>10.0%}"
            )
        for line in self.assumptions:
            yield f"  - {line}"


def simulate_queue(spec: RunSpec, *, seed: int = 0) -> QueueSimulation:
    """Simulate the queue at three ratios of generation to training time. Same seed, same answer."""
    return QueueSimulation(
        rows=[_Queue(spec, ratio, random.Random(seed)).run() for ratio in RATIOS],
        assumptions=[
            f"response times log-normal (spread {_SPREAD:g}), a group takes its longest",
            "serving does not slow down with load; publication takes no time",
            "times in units of one collection's training",
        ],
    )


class _Queue:
    """State of one simulation. A group is the number of the update it was admitted at."""

    def __init__(self, spec: RunSpec, ratio: float, rng: random.Random) -> None:
        settled = settle_concurrency(spec)
        self.rng = rng
        self.samples = spec.rollout.samples_per_prompt
        self.groups = spec.rollout.groups_per_collection
        self.updates = spec.core.updates_per_collection
        self.max_staleness = spec.async_.max_staleness
        self.in_flight_limit = settled.samples // self.samples
        self.bound = settled.bound_groups
        self.buffer_limit = spec.async_.buffer_collections * self.groups
        slots = spec.rollout.engines * spec.rollout.max_running_requests
        self.slots = max(1, slots // self.samples)
        self.ratio = ratio
        self.scale = ratio * self.slots / self.groups / self._mean_group()
        self.now = 0.0
        self.update = 0
        self.training = 0
        self.waiting: deque[int] = deque()
        self.running: list[tuple[float, int]] = []
        self.buffer: list[int] = []
        self.busy_area = 0.0
        self.regenerated = 0

    def _mean_group(self) -> float:
        return sum(self._longest() for _ in range(200)) / 200

    def _longest(self) -> float:
        return max(self.rng.lognormvariate(0.0, _SPREAD) for _ in range(self.samples))

    def run(self) -> QueueRow:
        """Train some collections; the first few only fill the queue."""
        staleness: list[int] = []
        waited = started = 0.0
        collections = min(_COLLECTIONS, max(_WARM_UP + 5, _MAX_GROUPS // self.groups))
        for number in range(collections):
            if number == _WARM_UP:
                self.busy_area, waited, started = 0.0, 0.0, self.now
                self.regenerated = 0
                staleness.clear()
            asked = self.now
            while len(self.buffer) < self.groups:
                self._next_group()
            waited += self.now - asked
            staleness += self._take()
            self._train()
        elapsed = self.now - started
        return QueueRow(
            generation_over_training=self.ratio,
            mean_staleness=round(sum(staleness) / len(staleness), 2),
            max_staleness=max(staleness),
            regenerated_share=round(self.regenerated / len(staleness), 3),
            trainer_wait_share=round(waited / elapsed, 3),
            serving_occupancy=round(self.busy_area / elapsed / self.slots, 3),
        )

    def _take(self) -> list[int]:
        """Hand the oldest groups to the trainer; returns their staleness."""
        self.buffer.sort()
        taken, self.buffer = self.buffer[: self.groups], self.buffer[self.groups :]
        self.training = self.groups
        return [self.update - admitted for admitted in taken]

    def _train(self) -> None:
        done = self.now + 1.0
        self._admit()
        while self.running and self.running[0][0] <= done:
            self._next_group()
        self._advance(done)
        self.training, self.update = 0, self.update + self.updates
        self._cancel_old()

    def _cancel_old(self) -> None:
        """A group that the new policy makes too old starts again, under that policy."""
        oldest = self.update - self.max_staleness
        kept = [each for each in self.running if each[1] >= oldest]
        fresh = [each for each in self.waiting if each >= oldest]
        young = [each for each in self.buffer if each >= oldest]
        cancelled = len(self.running) + len(self.waiting) + len(self.buffer)
        cancelled -= len(kept) + len(fresh) + len(young)
        self.regenerated += cancelled
        heapq.heapify(kept)
        self.running, self.buffer = kept, young
        self.waiting = deque([self.update] * cancelled + fresh)
        self._start_waiting()

    def _next_group(self) -> None:
        self._admit()
        finished, admitted = heapq.heappop(self.running)
        self._advance(finished)
        self.buffer.append(admitted)
        self._admit()

    def _admit(self) -> None:
        in_flight = len(self.running) + len(self.waiting)
        room = min(
            self.in_flight_limit - in_flight,
            self.in_flight_limit + self.buffer_limit - in_flight - len(self.buffer),
            self.bound - in_flight - len(self.buffer) - self.training,
        )
        self.waiting.extend([self.update] * max(0, room))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            finish = self.now + self.scale * self._longest()
            heapq.heappush(self.running, (finish, self.waiting.popleft()))

    def _advance(self, to: float) -> None:
        self.busy_area += len(self.running) * (to - self.now)
        self.now = to
