"""Verifiers that hang, die, lie or eat memory cost their group and nothing else. Real processes."""

import io
import math
import os
import select
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import anyio
import pytest

from runtime.data.samples import Prompt, PromptId
from runtime.errors import (
    BadVerdict,
    ConfigError,
    VerifierCrashed,
    VerifierTimeout,
    WaitTimeout,
)
from runtime.rewards import worker
from runtime.rewards.verifiers import Verifier, VerifierSpec
from runtime.rewards.wire import HEADER, MAX_REPLY_BYTES, body_length, unpack
from runtime.rewards.workers import VerifierPool

pytestmark = pytest.mark.anyio

MODULE = textwrap.dedent(
    '''
    """A user's verifiers; each notes its calls, so that tries can be counted."""
    import ctypes, os, signal, subprocess, sys, time

    def note(metadata, response):
        with open(metadata["calls"], "a") as file:
            file.write(f"{os.getpid()} {response}\\n")

    def length(response, answer, metadata, plus=0):
        note(metadata, response)
        return len(response) + plus

    def lengths(responses, answer, metadata):
        note(metadata, "+".join(responses))
        return [len(r) for r in responses]
    lengths.batched = True

    def one_verdict(responses, answer, metadata):
        note(metadata, "+".join(responses))
        return [1.0]

    def misbehave(response, answer, metadata):
        note(metadata, response)
        if response == "hang": time.sleep(3600)
        if response == "spin in C": pow(7, 10 ** 9)  # holds the interpreter lock
        if response == "raise": raise ValueError("no such answer")
        if response == "exit": sys.exit(3)
        if response == "segfault": ctypes.string_at(0)
        if response == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if response == "memory": return len(bytearray(1 << 31))
        if response == "none": return None
        if response == "nan": return float("nan")
        if response == "inf": return float("inf")
        if response == "text": return "1.0"
        if response == "list": return [1.0]
        if response == "huge": return 10 ** 400
        if response == "print":
            print("to stdout"); os.write(1, b"straight to the descriptor")
            sys.stderr.write("to stderr"); sys.stdin.read()
        if response == "printed": print("a clue"); raise ValueError
        if response == "forge":  # guesses the descriptor of the frames
            for fd in range(3, 20):
                try: os.write(fd, b"\\x00\\x00\\x00\\x02{}" if answer == "short" else b"\\xff" * 64)
                except OSError: pass
        if response == "deep":
            body = b"[" * 500000
            for fd in range(3, 20):
                try: os.write(fd, len(body).to_bytes(4, "big") + body)
                except OSError: pass
        if response == "child":
            child = subprocess.Popen(["sleep", "3600"])
            with open(metadata["calls"] + ".child", "a") as file: file.write(f"{child.pid}\\n")
            time.sleep(3600)
        if response.startswith("once"):
            flag = metadata["calls"] + "." + response
            if not os.path.exists(flag):
                open(flag, "w").close()
                os._exit(1)
        return 1.0
    '''
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "their_verifiers.py").write_text(MODULE)
    return folder


class Calls:
    def __init__(self, path):
        self.path = path

    def prompt(self, function, answer=None):
        return Prompt(
            id=PromptId(0, 5),
            token_ids=(1,),
            text="?",
            answer=answer,
            verifier=f"their_verifiers:{function}",
            metadata={"calls": str(self.path)},
        )

    @property
    def responses(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.partition(" ")[2] for line in lines]

    async def seen(self, response):
        """Wait until another process has noted this call; nothing but its file can say so."""
        with anyio.fail_after(30):
            while self.responses != [response]:  # noqa: ASYNC110 - no event crosses processes
                await anyio.sleep(0.01)

    @property
    def pids(self):
        return [int(line.partition(" ")[0]) for line in self.path.read_text().splitlines()]


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path / "calls")


def pool(module, *names, **options):
    specs = [
        name if isinstance(name, VerifierSpec) else VerifierSpec(name=f"their_verifiers:{name}")
        for name in names
    ]
    return VerifierPool(specs, search_paths=[module], **({"workers": 1} | options))


def wait_gone(pid, timeout_s=10):
    """Wait for the end of a process that need not be a child of ours."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], timeout_s)[0], f"process {pid} lives on"
    finally:
        os.close(fd)


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


@pytest.mark.parametrize(
    ("verdicts", "frames"),
    [
        ([1.0, 0.0, 1.0], [[1.0, 0.0, 1.0]]),
        ([1.0, 0.0, ValueError("no")], [[1.0, 0.0], "ValueError: no"]),
        ([ValueError("no"), 1.0], ["ValueError: no"]),
        ([1.0, math.nan, 1.0], [[1.0], [math.nan]]),
    ],
)
def test_verdicts_of_an_instant_verifier_travel_together_up_to_what_is_none(verdicts, frames):
    """So that the pool charges the response which it is about, and no other."""

    def verifier(response, answer, metadata):
        if isinstance(verdict := verdicts[int(response)], Exception):
            raise verdict
        return verdict

    request = {
        "request": 7, "verifier": "v", "responses": ["0", "1", "2"][: len(verdicts)],
        "answer": None, "metadata": {}, "apart": False,
    }  # fmt: skip
    sent = sent_by(verifier, request)
    assert [frame.get("verdicts", frame.get("error")) for frame in sent] == [
        pytest.approx(each, nan_ok=True) if isinstance(each, list) else each for each in frames
    ]
    assert {frame["request"] for frame in sent} == {7}


def sent_by(verifier, request, **options):
    """The frames with which a worker answers for an instant verifier."""
    replies = io.BytesIO()
    instant = Verifier(verifier, {}, batched=False, is_instant=True)
    worker._serve(request, {"v": instant}, replies, worker.Tail(), **options)
    replies.seek(0)
    sent = []
    while header := replies.read(HEADER.size):
        sent.append(unpack(replies.read(body_length(header, limit=MAX_REPLY_BYTES))))
    return sent


@pytest.mark.parametrize(
    ("apart", "frames"), [(False, [[1, 1, 1], [1], [1, 1]]), (True, [[1]] * 6)]
)
def test_verdicts_travel_no_later_than_a_moment_after_the_last_ones(apart, frames):
    """A group of slow responses meets no limit as one, and whoever is retried waits for nobody."""
    clock = [0.0]

    def verifier(response, answer, metadata):
        clock[0] += float(response)
        return 1

    request = {
        "request": 7, "verifier": "v", "responses": ["0.01", "0.02", "0.03", "9", "0", "0.05"],
        "answer": None, "metadata": {}, "apart": apart,
    }  # fmt: skip
    sent = sent_by(verifier, request, now=lambda: clock[0])
    assert [frame["verdicts"] for frame in sent] == frames


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


def test_a_worker_loads_no_heavy_module():
    code = "import runtime.rewards.worker, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "ray", "numpy", "pyarrow", "transformers", "pydantic", "anyio", "sympy"}
    assert heavy.isdisjoint(done.stdout.split())
