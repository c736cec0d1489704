"""The nodes of an attempt: who runs where, at which address, and whether all are still there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from runtime.errors import Interrupted

LOOPBACK = "127.0.0.1"
Ask = Callable[[], Sequence[Mapping[str, Any]]]
_POLL_S = 2.0
SETTLE_S = 30.0
"""After a failure, how long a node may take to be known as dead: Ray misses heartbeats first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the group."""

    id: str
    """Ray's, in hexadecimal."""
    address: str
    """Other nodes reach it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes in the order of the group's bundles; empty: everything runs on this host.

    Trainer ranks fill the nodes in order, engines fill them from the last one back, so that with
    several nodes they meet as late as possible.
    """

    nodes: tuple[Node, ...] = ()
    group: Any = None
    """Ray's placement group, a bundle a node."""

    def trainer_node(self, rank: int, ranks: int) -> int:
        """Bundle of a trainer rank: blocks of equal size, rank 0 on the first node."""
        return rank * min(len(self.nodes), ranks) // ranks if self.nodes else 0

    def engine_node(self, slot: int) -> int:
        """Bundle of an engine slot."""
        return len(self.nodes) - 1 - slot % len(self.nodes) if self.nodes else 0

    def address(self, node: int) -> str:
        """Where a node is reached from the others; loopback where there is one host."""
        return self.nodes[node].address if self.nodes else LOOPBACK

    def options(self, node: int) -> Mapping[str, Any]:
        """Options of an actor that belongs on a node."""
        if not self.nodes:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=node
        )
        return {"scheduling_strategy": strategy}

    def lost(self, known: Sequence[Mapping[str, Any]]) -> list[Node]:
        """Nodes of ours that a cluster no longer counts as alive.

        Args:
            known: what ``ray.nodes()`` answers.
        """
        alive = {each["NodeID"] for each in known if each["Alive"]}
        return [node for node in self.nodes if node.id not in alive]

    @asynccontextmanager
    async def watched(self, tasks: TaskGroup, ask: Ask | None = None) -> AsyncGenerator[None, None]:
        """Watch in the background for as long as the block lasts.

        Once the block has ended nobody asks Ray any more: it may be taken down then.

        Args:
            tasks: gets the watch's error, and is cancelled by it.
            ask: see ``check``.
        """
        scope, over = anyio.CancelScope(), anyio.Event()

        async def watch() -> None:
            try:
                with scope:
                    await self.watch(ask)
            finally:
                over.set()

        tasks.start_soon(watch)
        try:
            yield
        finally:
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await over.wait()

    async def watch(self, ask: Ask | None = None) -> None:
        """Run until a node is lost; returns at once where there is one host.

        Args:
            ask: see ``check``.

        Raises:
            Interrupted: naming the node.
        """
        while self.nodes:
            await self.check(ask)
            await anyio.sleep(_POLL_S)

    async def settle(self, *, within_s: float = SETTLE_S) -> None:
        """After a failure: find out within a while whether the loss of a node was its cause.

        Raises:
            Interrupted: if a node is lost.
        """
        if not self.nodes:
            return
        with anyio.move_on_after(within_s):
            await self.watch()

    async def check(self, ask: Ask | None = None) -> None:
        """Look once.

        Args:
            ask: what the cluster knows of its nodes; None asks Ray.

        Raises:
            Interrupted: if a node is lost.
        """
        if ask is None:
            import ray

            ask = ray.nodes
        lost = self.lost(await anyio.to_thread.run_sync(ask))
        if lost:
            named = ", ".join(f"{node.address} ({node.id[:12]})" for node in lost)
            raise Interrupted(
                f"node {named} of this attempt is gone; the next attempt goes on from the newest "
                "commit",
                nodes=named,
            )
