"""Ways to score and to step beside one another, on one loaded trainer, in turn.

A variant is compared with the one the trainer has, in rounds of a few calls each, so that all meet
the GPU in the same state; every round measures the anchor too. One that fails says so and costs
only itself. What wins here is still to be built into the trainer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.trainer.protocol import Sequence
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.update import Machinery

Call = Callable[[], object]
Timed = Callable[[Call, int], list[float]]


class Variants:
    """Scoring and stepping of one collection by one trainer, in more than one way."""

    def __init__(
        self, trainer: TorchTrainer, sequences: tuple[Sequence, ...], step: Call, *, has_gpu: bool
    ) -> None:
        self.trainer = trainer
        self.sequences = sequences
        self._step = step
        self._has_gpu = has_gpu
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_out: torch.Tensor | None = None

    @property
    def machinery(self) -> Machinery:
        """Of the trainer."""
        return self.trainer._ready  # pyright: ignore[reportPrivateUsage]

    def score(self) -> list[NDArray[np.float32]]:
        """As the trainer does it."""
        return self.trainer.score(self.sequences, temperature=1.0)

    def scoring(self) -> dict[str, Call]:
        """By name; the first is what all others are compared with."""
        return {"now": self.score}

    def stepping(self) -> dict[str, Call]:
        """The same for a whole step."""
        return {"now": self._step}

    @torch.no_grad()
    def replay(self) -> object:
        """The model's pass as one recorded graph: no host, no packing, results left on the GPU."""
        if not self._has_gpu:
            return None
        if self._graph is None:
            scorer = self.machinery.weights.scorer
            rows = self.machinery.packer.rows(self.sequences, range(len(self.sequences)))
            ((row, _),) = rows
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    scorer(row)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._graph_out = scorer(row)[0]
            self._graph, self._graph_row = graph, row
        self._graph.replay()
        return None

    def drop_graph(self) -> None:
        """Free what the recorded graph holds."""
        self._graph = self._graph_out = self._graph_row = None


def in_turn(
    calls: dict[str, Call],
    timed: Timed,
    anchor: Callable[[], float],
    *,
    flop: float,
    rounds: int,
    budget_s: float,
) -> dict[str, Any]:
    """Time every call in rounds of four, in turn, each with the anchor right before it.

    Args:
        calls: by name; the first is the one to compare with.
        timed: milliseconds of each of so many calls.
        anchor: FLOP/s of the product.
        flop: model FLOP of a call.
        rounds: how often each has its turn; fewer when ``budget_s`` is over.
        budget_s: for all, first calls (which may compile) left out.

    Returns:
        By name: ``ms``, ``min``, ``over_matmul`` (median over rounds of the share of that round's
        anchor), ``matmul``, ``against_first`` (ms, median over the rounds that both were timed in;
        None where there is none); or ``error``.
    """
    found: dict[str, Any] = {name: {} for name in calls}
    # By round, since a way that fails is out of the later ones.
    ms: dict[str, dict[int, float]] = {name: {} for name in calls}
    rates: dict[str, dict[int, float]] = {name: {} for name in calls}
    for name, call in calls.items():
        _or_error(partial(timed, call, 3), found[name])
    began = time.perf_counter()
    for turn in range(rounds):
        if turn and time.perf_counter() - began > budget_s:
            break
        for name, call in calls.items():
            rate = anchor()
            taken = _or_error(partial(timed, call, 4), found[name])
            if taken is not None:
                rates[name][turn] = rate
                ms[name][turn] = statistics.median(taken)
    first = ms[next(iter(calls))]
    for name, taken in ms.items():
        if not taken:
            continue
        shares = [flop / t * 1e3 / rates[name][turn] for turn, t in taken.items()]
        less = [t - first[turn] for turn, t in taken.items() if turn in first]
        found[name] |= {
            "ms": round(statistics.median(taken.values()), 2),
            "min": round(min(taken.values()), 2),
            "over_matmul": round(statistics.median(shares), 4),
            "matmul": round(statistics.median(rates[name].values()) / 1e12, 1),
            "against_first": round(statistics.median(less), 2) if less else None,
            "rounds": len(taken),
        }
    return found


def _or_error(action: Callable[[], list[float]], found: dict[str, Any]) -> list[float] | None:
    """Once a way failed it is not tried again."""
    if "error" in found:
        return None
    try:
        return action()
    except Exception as exc:  # an experiment may fail in any way
        found["error"] = f"{type(exc).__name__}: {exc}"[:400]
        return None


def gap(found: object, wanted: object) -> float | None:
    """Largest difference of two results of scoring; None where the first is none."""
    if not isinstance(found, list) or not isinstance(wanted, list):
        return None
    a, b = (np.concatenate([np.ravel(x) for x in some]) for some in (found, wanted))
    return round(float(np.abs(a - b).max()), 5) if a.shape == b.shape else None
