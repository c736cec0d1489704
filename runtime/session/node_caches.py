"""Compiler caches of nodes: one on this host, or one on each host of a group, kept by an actor.

Key and store are the node's own: another GPU is another key, whatever the leader has. Actors keep
to what the session told them, and end with its guard.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
from pydantic import JsonValue

from runtime.caches import publishing
from runtime.caches.key import CacheKey, key_of
from runtime.caches.publishing import PartReport, Publisher, Restored
from runtime.caches.stores import CacheStore, open_store
from runtime.clock import SystemClock
from runtime.session.nodes import Nodes
from runtime.session.scratch import private_folder
from runtime.waits import stretched

ANSWER_S = 60.0
"""For a node's actor to start and to answer, on top of the one wait that its work has."""
_PARTING_S = 5.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOrder:
    """What a node needs to know; it travels."""

    root: Path
    """On the node's local disk; the same name on each."""
    place: Path | str
    """``output.compiler_cache``."""
    model: Path
    layout: Mapping[str, JsonValue]
    wait_s: float
    publishers: int
    by: str
    engine_python: str | None = None
    """Interpreter of the engine's own environment, where an engine runs on the node."""


class NodeCache:
    """The caches of the node that this process runs on. Blocks; called from threads."""

    def __init__(self, order: CacheOrder) -> None:
        self._order = order
        self._cancelled = threading.Event()
        self._key: CacheKey | None = None
        self._store: CacheStore | None = None

    def restore(self) -> Restored:
        """Bring in what was published under this node's key.

        Raises:
            Exception: whatever a store or a disk comes up with; every compiler starts cold then.
        """
        order = self._order
        self._key = key_of(
            order.model,
            order.layout,
            engine_python=order.engine_python,
            cancelled=self._cancelled,
        )
        self._store = open_store(order.place)
        return publishing.restore(order.root, self._store, self._key, wait_s=order.wait_s)

    def publish(self) -> list[PartReport]:
        """Publish what was compiled here; empty where nothing was brought up to begin with."""
        if self._key is None or self._store is None:
            return []
        order = self._order
        return Publisher(
            root=order.root,
            store=self._store,
            key=self._key,
            by=order.by,
            publishers=order.publishers,
            wait_s=order.wait_s,
            clock=SystemClock(),
            cancelled=self._cancelled,
        ).publish()

    def cancel(self) -> None:
        """Begin nothing more. From any thread."""
        self._cancelled.set()

    def discard(self) -> None:
        """Remove the node's copy."""
        publishing.discard(self._order.root)


class CacheActor:
    """A NodeCache in an actor of its own. A plain class, as Ray wants it."""

    def __init__(self, order: CacheOrder, attempt_dir: str, epoch: int) -> None:
        from runtime.session.member import join_attempt

        join_attempt(attempt_dir, epoch=epoch)
        self._root = order.root
        self._cache = NodeCache(order)

    def restore(self) -> Restored:
        """See NodeCache. Sweeps what sessions of this run that died here have left."""
        private_folder(self._root.parent)
        for older in self._root.parent.glob(f"{self._root.name.partition('-')[0]}-*.caches"):
            if older != self._root:  # its epoch is over: the newest one alone gets here
                publishing.discard(older)
        return self._cache.restore()

    def publish(self) -> list[PartReport]:
        """See NodeCache; the copy is gone afterwards."""
        try:
            return self._cache.publish()
        finally:
            self._cache.discard()

    def cancel(self) -> None:
        """See NodeCache."""
        self._cache.cancel()


def hosts_of(nodes: Nodes, *, trainer_ranks: int, engines: int) -> dict[str, tuple[int, list[str]]]:
    """Hosts of a group by address: one of its bundles, and the roles that compile there.

    Args:
        nodes: of the attempt; two nodes of one host share its disk, and so its caches.
        trainer_ranks: of the run.
        engines: of the run.
    """
    roles: dict[int, set[str]] = {number: set() for number in range(len(nodes.nodes))}
    for rank in range(trainer_ranks):
        roles[nodes.trainer_node(rank, trainer_ranks)].add("trainer")
    for slot in range(engines):
        roles[nodes.engine_node(slot)].add("engine")
    found: dict[str, tuple[int, list[str]]] = {}
    for number, node in enumerate(nodes.nodes):
        first, known = found.get(node.address, (number, []))
        found[node.address] = first, sorted({*known, *roles[number]})
    return {address: host for address, host in found.items() if host[1]}


def order_on(order: CacheOrder, roles: list[str]) -> CacheOrder:
    """The order of a host: a trainer's compiles other things than an engine's, and shares none.

    Args:
        order: of the group.
        roles: of the host; without ``engine`` it need not have the engine's interpreter.
    """
    return replace(
        order,
        layout={**order.layout, "node": "+".join(roles)},
        engine_python=order.engine_python if "engine" in roles else None,
    )


@asynccontextmanager
async def once(
    is_so: Callable[[], bool], act: Callable[[], Awaitable[None]]
) -> AsyncGenerator[None]:
    """While the body runs: look now and then, and act when it is so, once."""

    async def watch() -> None:
        while True:
            if is_so():
                await act()
                return
            await anyio.sleep(_POLL_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()


@dataclass(slots=True, kw_only=True)
class GroupCaches:
    """The caches of every host of a group that compiles anything. Nothing in here raises."""

    order: CacheOrder
    attempt_dir: str
    epoch: int
    _actors: dict[str, Any] = field(default_factory=dict[str, Any], init=False)

    async def restore(
        self, nodes: Nodes, *, trainer_ranks: int, engines: int
    ) -> dict[str, Restored | Exception]:
        """Start an actor a host, and bring in what its key has; by address.

        Args:
            nodes: of the attempt.
            trainer_ranks: of the run.
            engines: of the run.
        """
        hosts = hosts_of(nodes, trainer_ranks=trainer_ranks, engines=engines)
        for address, (bundle, roles) in hosts.items():
            self._actors[address] = self._start(nodes, bundle, order_on(self.order, roles))
        found: dict[str, Restored | Exception] = {}
        await self._all("restore", found)
        return found

    async def publish(
        self, is_terminated: Callable[[], bool]
    ) -> dict[str, list[PartReport] | Exception]:
        """Publish on all hosts at once, each with its own limits; by address.

        Args:
            is_terminated: the hardware is being taken away: nothing more is begun then, and whoever
                does not answer soon is waited for no longer; the others' answers count.
        """
        found: dict[str, list[PartReport] | Exception] = {}
        if is_terminated():
            return found
        with anyio.CancelScope() as waiting:

            async def leave() -> None:
                for actor in self._actors.values():
                    actor.cancel.remote()
                waiting.deadline = anyio.current_time() + _PARTING_S

            async with once(is_terminated, leave):
                await self._all("publish", found)
        return found

    def _start(self, nodes: Nodes, bundle: int, order: CacheOrder) -> Any:
        import ray

        decorate: Any = ray.remote  # its overloads know no options for classes
        actor_class = decorate(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,  # a cancellation comes beside what it cancels
            **nodes.options(bundle),
        )(CacheActor)
        return actor_class.remote(order, self.attempt_dir, self.epoch)

    async def _all(self, what: str, found: dict[str, Any]) -> None:
        """Ask every host at once; ``found`` has what came in, whenever the wait is cut off."""
        limit_s = self.order.wait_s + stretched("coordination", ANSWER_S)

        async def one(address: str, actor: Any) -> None:
            try:
                with anyio.fail_after(limit_s):
                    found[address] = await getattr(actor, what).remote()
            except Exception as error:  # a lost node, a disk, a store: none of it is the run's
                found[address] = error

        async with anyio.create_task_group() as tasks:
            for address, actor in self._actors.items():
                tasks.start_soon(one, address, actor)
