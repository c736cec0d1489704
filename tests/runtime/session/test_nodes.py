"""Watching the nodes of an attempt: a lost one is named, and nobody asks once it is over."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.from_thread
import pytest

from runtime.errors import Interrupted
from runtime.session import nodes
from runtime.session.nodes import Node, Nodes

pytestmark = pytest.mark.anyio
NODES = Nodes(nodes=(Node(id="a" * 56, address="10.0.0.1"), Node(id="b" * 56, address="10.0.0.2")))


def known(*alive: bool) -> Sequence[Mapping[str, Any]]:
    return [
        {"NodeID": node.id, "Alive": is_alive}
        for node, is_alive in zip(NODES.nodes, alive, strict=True)
    ]


async def test_a_lost_node_cancels_the_work_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_POLL_S", 0.0)
    answers = [known(True, True), known(True, False)]
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks, NODES.watched(tasks, lambda: answers.pop(0)):
            await anyio.sleep_forever()
    assert answers == []
    (error,) = caught.value.exceptions
    assert isinstance(error, Interrupted)
    assert "10.0.0.2 (bbbbbbbbbbbb)" in error.message


async def test_after_the_block_no_question_is_open_and_none_follows() -> None:
    asked, answered, may_answer = anyio.Event(), threading.Event(), threading.Event()

    def ask() -> Sequence[Mapping[str, Any]]:
        anyio.from_thread.run_sync(asked.set)
        may_answer.wait(30)  # bounded: a thread cannot be cancelled
        answered.set()
        return known(True, True)

    async def answer_later() -> None:
        await anyio.wait_all_tasks_blocked()  # the block is being left
        may_answer.set()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with NODES.watched(tasks, ask):
                await asked.wait()
                tasks.start_soon(answer_later)
            assert answered.is_set()
        # The group has ended: the watch is over, and asks no more.


async def test_where_there_is_one_host_nobody_is_asked() -> None:
    def ask() -> Sequence[Mapping[str, Any]]:
        raise AssertionError("asked")

    async with anyio.create_task_group() as tasks, Nodes().watched(tasks, ask):
        await anyio.wait_all_tasks_blocked()
