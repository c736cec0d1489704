"""What must not end an engine, and what does: for ``gpu_refresh``, last of its parts."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import psutil

from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.errors import ContractViolation, EngineRefused
from runtime.policy import PolicyId

if TYPE_CHECKING:
    from benchmarks.gpu_home import Home

PROBE_S = 10.0


async def faults(home: Home, found: dict[str, Any]) -> None:
    """Each fault, and whether the engine serves the published weights after it."""
    await home.publish(PolicyId(1, 2_000_000))
    found["token outside the vocabulary"] = await _refused(home, _bad_token)
    found["malformed bucket"] = await _refused(home, _bad_bucket)
    found["flush after retract"] = await _refused(home, _flush_after_retract)
    found["scheduler killed"] = await _returns(home, signal.SIGKILL)
    found["scheduler stopped"] = await _returns(home, signal.SIGSTOP)


async def _refused(home: Home, provoke: Any) -> dict[str, Any]:
    try:
        await provoke(home)
    except (ContractViolation, EngineRefused) as error:
        return {"refused": str(error)[:160], "serves": await _serves(home)}
    return {"refused": None, "serves": await _serves(home)}


async def _bad_token(home: Home) -> None:
    request = GenerateRequest(
        rid="bad", input_ids=(1, 2, 99_999_999), sampling=SamplingSettings(max_new_tokens=4)
    )
    await home.client.generate(request, deadline_s=30)


async def _bad_bucket(home: Home) -> None:
    folder = home.folder / "bad"
    folder.mkdir(exist_ok=True)
    shared = await home.trainer.share_weights(99, str(folder), frozenset({"sha256"}))
    first = shared.buckets[0]
    cut = replace(first.tensors[0], end=first.tensors[0].end - 1)
    await home.client.update_from_shared(
        replace(first, tensors=(cut, *first.tensors[1:])), flush=False
    )


async def _flush_after_retract(home: Home) -> None:
    await home.client.pause("retract")
    try:
        await home.client.update_from_disk("/nowhere", PolicyId(1, 1), flush=True)
    finally:
        await home.client.resume()


async def _serves(home: Home) -> bool:
    """It answers, and holds exactly what was published."""
    request = GenerateRequest(
        rid=f"serves-{time.time_ns()}", input_ids=(1, 2, 3),
        sampling=SamplingSettings(max_new_tokens=4),
    )  # fmt: skip
    (answer,) = await home.client.generate(request, deadline_s=60)
    return answer.prefill == home.publisher.published


async def _returns(home: Home, number: signal.Signals) -> dict[str, Any]:
    """Stop or kill the server's own worker under load; how it is found out and comes back."""
    victim = _worker(home.address.pid)
    long = GenerateRequest(
        rid=f"long-{number}", input_ids=(1, 2, 3),
        sampling=SamplingSettings(max_new_tokens=1024, ignore_eos=True),
    )  # fmt: skip
    lost: list[str] = []
    found_by, found_s, gone_s = "", 0.0, 0.0

    async def ask() -> None:
        try:
            await home.client.generate(long, deadline_s=120)
        except Exception as error:  # how a client learns of it is what is asked
            lost.append(type(error).__name__)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(0.3)
        began = time.monotonic()
        os.kill(victim, number)
        found_by = await _found_dead(home)
        found_s = time.monotonic() - began
        await anyio.to_thread.run_sync(home.owner.stop)
        gone_s = time.monotonic() - began
        await home.client.close()
    before, published = home.address.incarnation, home.publisher.published
    home.pool.mark_dead(0, before, f"{number.name} in a benchmark")
    home.pool.restarting(0)
    assert published is not None
    await home.start_engine()
    decision = await home.publisher.bring_up(home.target(), published)
    home.pool.mark_verified(0, home.address.incarnation, published)
    return {
        "found_dead_by": found_by,
        "found_dead_after_s": round(found_s, 2),
        "group_gone_after_s": round(gone_s, 2),
        "request": lost,
        "restart_s": home.start_s[-1],
        "brought_up": [decision.policy, decision.outcome, round(decision.pause_s or 0.0, 4)],
        "serves": await _serves(home),
    }


async def _found_dead(home: Home) -> str:
    """Wait until it is seen, the two ways a session looks: at its processes, and by a probe."""
    by: list[str] = []

    async def probe() -> None:
        while await home.client.is_alive(timeout_s=PROBE_S):
            pass  # a health call takes its time
        by.append("probe")
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probe)
        while home.owner.is_running():  # noqa: ASYNC110 - processes tell nobody that they ended
            await anyio.sleep(0.02)
        by.append("its processes")
        tasks.cancel_scope.cancel()
    return by[0]


def _worker(pid: int) -> int:
    """The process with the weights: SGLang's scheduler, or the server itself."""
    for child in psutil.Process(pid).children(recursive=True):
        if "scheduler" in " ".join(child.cmdline()):
            return child.pid
    return pid
