"""Which sequences share a micro-batch, and which rank runs it. Plain Python, no tensors.

A *unit* is what stays together: one sample, or siblings whose common prompt runs once. Units go
into *bins* (micro-batches) by first-fit-decreasing, bins go to data ranks by largest differencing.
No loss weight depends on any of it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runtime.errors import ContractViolation


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples that run together: one prompt of ``prompt`` tokens, then each response."""

    prompt: int
    members: tuple[tuple[int, int], ...]
    """(index of the sequence in the collection, response tokens)"""

    @property
    def tokens(self) -> int:
        """Tokens of the packed row."""
        return self.prompt + sum(n for _, n in self.members)


Cost = Callable[[Unit], float]
Bin = list[Unit]


def by_tokens(unit: Unit) -> float:
    """Cost of a unit as its number of tokens."""
    return float(unit.tokens)


def by_flops(flops_per_token: float, flops_per_pair: float) -> Cost:
    """Cost of a unit in FLOPs: linear layers per token, attention per causal (query, key) pair.

    Args:
        flops_per_token: 2 x parameters of the layers, for one forward pass; passes cancel.
        flops_per_pair: 4 x heads x head size x layers.
    """

    def cost(unit: Unit) -> float:
        pairs = unit.prompt * (unit.prompt + 1) / 2
        pairs += sum(n * unit.prompt + n * (n + 1) / 2 for _, n in unit.members)
        return flops_per_token * unit.tokens + flops_per_pair * pairs

    return cost


def make_units(
    sequences: Iterable[tuple[int, int, int, object]], *, capacity: int, share_prompts: bool
) -> list[Unit]:
    """Turn sequences into units that fit a bin.

    Args:
        sequences: (index, prompt tokens, response tokens, prompt key); sequences with equal keys
            have the same prompt.
        capacity: tokens of a bin.
        share_prompts: let sequences of one key share the prompt's tokens, as far as they fit.

    Raises:
        ContractViolation: if a single sequence is larger than a bin; ``validate`` promises it
            cannot be.
    """
    by_key: dict[object, list[tuple[int, int, int]]] = {}
    for index, prompt, response, key in sequences:
        if prompt + response > capacity:
            raise ContractViolation(
                f"a sequence of {prompt} + {response} tokens does not fit a bin of {capacity}",
                prompt_tokens=prompt,
                response_tokens=response,
                capacity=capacity,
            )
        shared = key if share_prompts else index
        by_key.setdefault(shared, []).append((index, prompt, response))
    return [unit for members in by_key.values() for unit in _fill_units(members, capacity)]


def _fill_units(members: list[tuple[int, int, int]], capacity: int) -> list[Unit]:
    units: list[Unit] = []
    held: list[tuple[int, int]] = []
    prompt = members[0][1]
    used = prompt
    for index, _, response in members:
        if held and used + response > capacity:
            units.append(Unit(prompt, tuple(held)))
            held, used = [], prompt
        held.append((index, response))
        used += response
    return [*units, Unit(prompt, tuple(held))]


def first_fit_decreasing(units: Sequence[Unit], capacity: int) -> list[Bin]:
    """Put units into as few bins of ``capacity`` tokens as first-fit-decreasing finds.

    At most 11/9 of the optimum plus one bin. Order among equals is by position, so the result is
    the same on every rank.
    """
    bins: list[Bin] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda u: -u.tokens):
        at = next((i for i, free in enumerate(room) if free >= unit.tokens), None)
        if at is None:
            bins.append([])
            room.append(capacity)
            at = len(bins) - 1
        bins[at].append(unit)
        room[at] -= unit.tokens
    return bins


def plan_bins(units: Sequence[Unit], *, capacity: int, ranks: int, cost: Cost) -> list[list[Bin]]:
    """Bins of each rank, equally many on every rank.

    Ranks run collectives inside a micro-batch, so all need the same number; the largest bins are
    split until it is a multiple of ``ranks``. Once every bin holds a single sequence the rest of
    the number is made up with empty bins.
    """
    bins = first_fit_decreasing(units, capacity)
    while len(bins) % ranks or not bins:
        if not _split_largest(bins, cost):
            bins.append([])
    costs = [sum(cost(unit) for unit in a_bin) for a_bin in bins]
    return [[bins[i] for i in part] for part in karmarkar_karp(costs, ranks)]


def _split_largest(bins: list[Bin], cost: Cost) -> bool:
    """Halve the dearest bin that holds more than one sequence; False if there is none."""
    order = sorted(range(len(bins)), key=lambda i: -sum(cost(unit) for unit in bins[i]))
    for i in order:
        units = bins[i]
        if len(units) == 1 and len(units[0].members) > 1:
            unit = units[0]
            half = len(unit.members) // 2
            units = [
                Unit(unit.prompt, unit.members[:half]),
                Unit(unit.prompt, unit.members[half:]),
            ]
        if len(units) > 1:
            sides = karmarkar_karp([cost(unit) for unit in units], 2, equal_size=False)
            bins[i] = [units[k] for k in sides[0]]
            bins.append([units[k] for k in sides[1]])
            return True
    return False


def karmarkar_karp(
    costs: Sequence[float], parts: int, *, equal_size: bool = True
) -> list[list[int]]:
    """Divide items into ``parts`` of nearly equal cost by the largest differencing method.

    Args:
        costs: one number >= 0 per item.
        parts: number of parts, >= 1.
        equal_size: every part gets the same number of items, which must then divide.

    Returns:
        Item positions per part, ascending within a part; every item exactly once.

    Raises:
        ValueError: if items cannot be divided equally.

    Source: Karmarkar and Karp 1982; the equal-size form seeds the heap with rows of ``parts`` items
    of similar cost.
    """
    if equal_size and len(costs) % parts:
        raise ValueError(f"{len(costs)} items do not divide into {parts} equal parts")
    if not costs:
        return [[] for _ in range(parts)]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    width = parts if equal_size else 1
    rows = [order[at : at + width] for at in range(0, len(order), width)]
    ticket = itertools.count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for row in rows:
        sets = [(costs[i], [i]) for i in row] + [(0.0, list[int]())] * (parts - len(row))
        heap.append((-_spread(sets), next(ticket), sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        # Largest of one with smallest of the other: their differences cancel.
        merged = [
            (a + b, xs + ys)
            for (a, xs), (b, ys) in zip(left, sorted(right, key=lambda s: s[0]), strict=True)
        ]
        merged.sort(key=lambda s: -s[0])
        heapq.heappush(heap, (-_spread(merged), next(ticket), merged))
    return [sorted(items) for _, items in heap[0][2]]


def _spread(sets: Sequence[tuple[float, list[int]]]) -> float:
    sums = [total for total, _ in sets]
    return max(sums) - min(sums)


def split_into_steps(groups: Sequence[int], num_steps: int) -> list[list[int]]:
    """Divide a collection into optimizer steps; siblings stay in one step.

    Args:
        groups: group of each sequence, in order.
        num_steps: wanted steps; fewer come out when there are fewer groups.

    Returns:
        Positions of the sequences of each step: consecutive groups, sizes in groups differ by at
        most one.
    """
    distinct = list(dict.fromkeys(groups))
    num_steps = min(num_steps, len(distinct)) or 1
    share, more = divmod(len(distinct), num_steps)
    step_of: dict[int, int] = {}
    at = 0
    for step in range(num_steps):
        size = share + (step < more)
        step_of.update(dict.fromkeys(distinct[at : at + size], step))
        at += size
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    for position, group in enumerate(groups):
        steps[step_of[group]].append(position)
    return steps
