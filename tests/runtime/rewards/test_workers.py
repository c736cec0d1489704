"""The pool: who judges, for how long, and what becomes of its processes. Real ones."""

import os
import signal
import subprocess
import sys

import anyio
import pytest

from runtime.data.samples import Prompt, PromptId
from runtime.errors import (
    ConfigError,
    WaitTimeout,
)
from runtime.rewards.verifiers import VerifierSpec
from runtime.rewards.workers import VerifierPool
from tests.runtime.rewards.their_verifiers import pool, wait_gone

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_a_group_is_judged_in_order_by_one_process(module, calls):
    with_argument = VerifierSpec(name="their_verifiers:length", arguments={"plus": 10})
    async with pool(module, with_argument, "lengths") as verifiers:
        texts = ["a", "", "ccc"]
        assert await verifiers.judge(calls.prompt("length"), texts) == [11, 10, 13]
        assert calls.responses == texts
        assert await verifiers.judge(calls.prompt("lengths"), texts) == [1, 0, 3]
        assert calls.responses[3:] == ["a++ccc"]
        assert await verifiers.judge(calls.prompt("length"), []) == []
        assert len(set(calls.pids)) == 1
        assert (verifiers.counts.judged, verifiers.counts.started) == (6, 1)


async def test_the_limit_is_for_each_response_and_not_for_the_group(module, calls):
    slow = module / "slow_verifiers.py"
    slow.write_text("import time\ndef slow(r, a, m):\n    time.sleep(0.3)\n    return 1\n")
    specs = [VerifierSpec(name="slow_verifiers:slow")]
    prompt = Prompt(
        id=PromptId(0, 0), token_ids=(1,), text="", answer=None, verifier="slow_verifiers:slow"
    )
    async with VerifierPool(specs, workers=1, time_limit_s=2, search_paths=[module]) as verifiers:
        assert await verifiers.judge(prompt, ["x"] * 8) == [1] * 8
        assert verifiers.counts.timeouts == 0


async def test_a_worker_that_died_idle_is_replaced_without_charge(module, calls):
    async with pool(module, "misbehave") as verifiers:
        await verifiers.judge(calls.prompt("misbehave"), ["good"])
        (pid,) = calls.pids
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        assert await verifiers.judge(calls.prompt("misbehave"), ["good"]) == [1]
        assert calls.responses == ["good", "good"]


async def test_cancelling_kills_the_worker_and_the_next_group_gets_a_fresh_one(module, calls):
    async with pool(module, "misbehave", time_limit_s=60) as verifiers:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(verifiers.judge, calls.prompt("misbehave"), ["hang"])
            await calls.seen("hang")
            tasks.cancel_scope.cancel()
        wait_gone(calls.pids[0])
        assert await verifiers.judge(calls.prompt("misbehave"), ["good"]) == [1]
        assert verifiers.counts.timeouts == verifiers.counts.crashes == 0


async def test_processes_are_bounded_and_a_wait_for_one_has_a_deadline(module, calls):
    async with (
        pool(module, "misbehave", time_limit_s=60, queue_deadline_s=0.2) as verifiers,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(verifiers.judge, calls.prompt("misbehave"), ["hang"])
        await calls.seen("hang")
        with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for a free verifier worker"):
            await verifiers.judge(calls.prompt("misbehave"), ["good"])
        assert verifiers.counts.started == 1
        tasks.cancel_scope.cancel()


async def test_many_groups_share_few_workers(module, calls):
    async with pool(module, "length", workers=2) as verifiers:
        results = {}

        async def judge(n):
            results[n] = await verifiers.judge(calls.prompt("length"), ["x" * n, "y"])

        async with anyio.create_task_group() as tasks:
            for n in range(40):
                tasks.start_soon(judge, n)
        assert results == {n: [n, 1] for n in range(40)}
        assert verifiers.counts.started <= 2
        assert len(set(calls.pids)) <= 2


async def test_a_closed_pool_has_no_processes_and_starts_none(module, calls):
    async with pool(module, "misbehave", time_limit_s=60) as verifiers:
        closed = []

        async def hang():
            try:
                await verifiers.judge(calls.prompt("misbehave"), ["hang"])
            except anyio.ClosedResourceError as error:
                closed.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await calls.seen("hang")
            await verifiers.aclose()
            await verifiers.aclose()
        assert len(closed) == 1
        wait_gone(calls.pids[0])
        with pytest.raises(anyio.ClosedResourceError):
            await verifiers.judge(calls.prompt("misbehave"), ["good"])
        assert verifiers.counts.started == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_verifiers:nothing", "no function 'nothing'"),
        ("no_such_module:f", "ModuleNotFoundError"),
    ],
)
async def test_a_verifier_that_cannot_be_loaded_is_known_before_training(module, name, message):
    with pytest.raises(ConfigError, match=message):
        async with pool(module, VerifierSpec(name=name)):
            pass


async def test_a_prompt_with_a_verifier_nobody_announced_is_refused(module, calls):
    async with pool(module, "length") as verifiers:
        with pytest.raises(ConfigError, match="misbehave"):
            await verifiers.judge(calls.prompt("misbehave"), ["x"])


PARENT = """
import sys, anyio
from runtime.data.samples import Prompt, PromptId
from runtime.rewards.verifiers import VerifierSpec
from runtime.rewards.workers import VerifierPool

async def main(folder, calls, response):
    name = "their_verifiers:misbehave"
    prompt = Prompt(id=PromptId(0, 0), token_ids=(1,), text="", answer=None, verifier=name,
                    metadata={"calls": calls})
    async with VerifierPool([VerifierSpec(name=name)], workers=1, search_paths=[folder],
                            time_limit_s=3600) as pool:
        await pool.judge(prompt, [response])
        print("judged", flush=True)
        await anyio.sleep(3600)

anyio.run(main, *sys.argv[1:])
"""


@pytest.mark.parametrize("response", ["good", "hang", "spin in C"])
async def test_workers_die_with_their_parent_whatever_they_do(module, calls, response):
    parent = subprocess.Popen(  # noqa: ASYNC220 - it starts, nothing waits
        [sys.executable, "-c", PARENT, module, calls.path, response]
    )
    try:
        await calls.seen(response)
        parent.kill()
        parent.wait()
        wait_gone(calls.pids[0])
    finally:
        parent.kill()
        parent.wait()
