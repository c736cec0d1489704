"""Verifiers that hang, die, lie or eat memory cost their group and nothing else. Real processes."""

from dataclasses import replace

import pytest

from runtime.errors import (
    BadVerdict,
    VerifierCrashed,
    VerifierTimeout,
)
from runtime.rewards.verifiers import VerifierSpec
from tests.runtime.rewards.their_verifiers import pool, wait_gone

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        ("raise", VerifierCrashed, "ValueError: no such answer"),
        ("exit", VerifierCrashed, "exited with 3"),
        ("segfault", VerifierCrashed, "ended by SIGSEGV"),
        ("killed", VerifierCrashed, "ended by SIGKILL"),
        ("memory", VerifierCrashed, "MemoryError"),
        ("none", BadVerdict, "NoneType None"),
        ("nan", BadVerdict, "no finite number"),
        ("inf", BadVerdict, "no finite number"),
        ("text", BadVerdict, "str '1.0'"),
        ("list", BadVerdict, "list"),
        ("huge", VerifierCrashed, "OverflowError"),
        ("forge", VerifierCrashed, "a frame of 4294967295 bytes"),
        ("deep", VerifierCrashed, "nested too deeply"),
    ],
)
async def test_a_response_that_breaks_its_verifier_is_tried_twice_and_charged(
    module, calls, response, error, message
):
    async with pool(module, "misbehave", memory_limit_bytes=1 << 30) as verifiers:
        with pytest.raises(error, match=message) as caught:
            await verifiers.judge(calls.prompt("misbehave"), ["good", response, "never"])
        tried = [r for r in calls.responses if r != "never"]  # a forger may get on before its end
        assert tried == ["good", response, response]
        assert len(set(calls.pids)) == 2, "the second try goes to a fresh process"
        assert caught.value.detail["response"] == response
        assert caught.value.detail["prompt"] == "0:5"
        assert verifiers.counts.crashes + verifiers.counts.bad_verdicts == 2
        # The pool goes on as if nothing had been.
        assert await verifiers.judge(calls.prompt("misbehave"), ["fine"]) == [1]
        assert verifiers.counts.started == 3


@pytest.mark.parametrize("response", ["hang", "spin in C"])
async def test_a_hanging_verifier_is_killed_at_its_limit_twice(module, calls, response):
    async with pool(module, "misbehave", time_limit_s=0.5) as verifiers:
        with pytest.raises(VerifierTimeout, match=r"no verdict within 0\.5 s"):
            await verifiers.judge(calls.prompt("misbehave"), ["good", response])
        assert calls.responses == ["good", response, response]
        for pid in calls.pids:
            wait_gone(pid)
        assert verifiers.counts.timeouts == 2


async def test_an_instant_verifier_that_fails_charges_the_response_it_failed_on(module, calls):
    """Though the verdicts that its siblings had were lost with the first worker."""
    (module / "instant_verifiers.py").write_text(
        "from runtime.rewards import verifiers\n"
        "from their_verifiers import misbehave\n"
        "verifiers._INSTANT.add('instant_verifiers:misbehave')\n"
    )
    prompt = replace(calls.prompt("misbehave"), verifier="instant_verifiers:misbehave")
    async with pool(module, VerifierSpec(name=prompt.verifier)) as verifiers:
        assert await verifiers.judge(prompt, ["good", "once", "fine"]) == [1, 1, 1]
        assert calls.responses == ["good", "once", "good", "once", "fine"]
        with pytest.raises(VerifierCrashed, match="exited with 3") as caught:
            await verifiers.judge(prompt, ["good", "exit", "never"])
        assert caught.value.detail["response"] == "exit"
        assert calls.responses[5:] == ["good", "exit", "good", "exit", "exit"]


async def test_children_of_a_verifier_die_with_it(module, calls):
    async with pool(module, "misbehave", time_limit_s=0.5) as verifiers:
        with pytest.raises(VerifierTimeout):
            await verifiers.judge(calls.prompt("misbehave"), ["child"])
    for pid in map(int, (calls.path.parent / "calls.child").read_text().split()):
        wait_gone(pid)


async def test_a_failure_that_does_not_come_again_costs_nothing(module, calls):
    async with pool(module, "misbehave") as verifiers:
        texts = ["a", "once", "b", "once more"]
        assert await verifiers.judge(calls.prompt("misbehave"), texts) == [1, 1, 1, 1]
        assert calls.responses == ["a", "once", "once", "b", "once more", "once more"]
        assert verifiers.counts.crashes == 2


async def test_a_batch_with_the_wrong_number_of_verdicts_is_a_bad_verdict(module, calls):
    spec = VerifierSpec(name="their_verifiers:one_verdict", batched=True)
    async with pool(module, spec) as verifiers:
        with pytest.raises(BadVerdict, match="1 verdicts for 2 responses"):
            await verifiers.judge(calls.prompt("one_verdict"), ["a", "b"])
        assert calls.responses == ["a+b", "a+b"]
        assert await verifiers.judge(calls.prompt("one_verdict"), ["a"]) == [1]


async def test_what_a_verifier_prints_disturbs_nothing_and_explains_its_errors(module, calls):
    async with pool(module, "misbehave") as verifiers:
        assert await verifiers.judge(calls.prompt("misbehave"), ["print", "good"]) == [1, 1]
        with pytest.raises(VerifierCrashed) as caught:
            await verifiers.judge(calls.prompt("misbehave"), ["printed"])
        assert "printed: a clue" in str(caught.value.detail["trace"])


async def test_a_forged_frame_is_not_taken_for_an_answer(module, calls):
    async with pool(module, "misbehave") as verifiers:
        with pytest.raises(VerifierCrashed, match="answered what nobody asked"):
            await verifiers.judge(calls.prompt("misbehave", answer="short"), ["forge"])
