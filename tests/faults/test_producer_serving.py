"""A real HTTP server that misbehaves by script, against the real client and the real producer."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from runtime.data.samples import Prompt
from runtime.engines.client import HttpEngineClient
from runtime.engines.protocol import EngineInfo
from runtime.errors import ContractViolation
from tests.runtime.rollout.live import EPOCH, LiveRun

pytestmark = pytest.mark.anyio

INFO = EngineInfo(
    version="scripted", vocab_size=1000, context_length=100, max_running_requests=8,
    native_spans=True, takes_salt=True, update_bracket=False,
)  # fmt: skip
NUM_PROMPTS = 6
VICTIM = 3


def sample(request, finish=None):
    version = request["extra_key"]  # the salt is the policy it was routed at
    return {
        "text": "",
        "output_ids": [7, 8],
        "meta_info": {
            "id": request["rid"],
            "finish_reason": finish or {"type": "stop"},
            "prompt_tokens": 2,
            "weight_version": version,
            "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
            "weight_versions": [{"version": version, "start": 0, "end": 2}],
        },
    }


def good(request):
    return web.json_response([sample(request) for _ in range(request["sampling_params"]["n"])])


def refusal(status, message):
    body = {"object": "error", "message": message, "type": str(status), "code": status}
    return web.json_response(body, status=status)


def aborted(request):
    finish = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    return web.json_response([sample(request), sample(request, finish)])


class ScriptedEngine:
    """Answers well, except that the victim's first request meets the fault."""

    def __init__(self, fault):
        self.fault = fault
        self.seen = []
        self.disconnected = []

    async def generate(self, http):
        request = await http.json()
        index = request["input_ids"][1]
        self.seen.append((index, request["rid"]))
        if index != VICTIM or sum(i == VICTIM for i, _ in self.seen) > 1:
            return good(request)
        try:
            return await getattr(self, self.fault)(http, request)
        except asyncio.CancelledError:
            self.disconnected.append(index)
            raise

    async def reset(self, http, request):
        http.transport.abort()
        await asyncio.sleep(30)

    async def closed_mid_answer(self, http, request):
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(http)
        await response.write(b'[{"text": "')
        http.transport.close()
        return response

    async def hang(self, http, request):
        await asyncio.sleep(30)

    async def status_429(self, http, request):
        return refusal(429, "Too many requests")

    async def queue_full(self, http, request):
        return refusal(503, "The request queue is full.")

    async def evicted(self, http, request):
        return refusal(503, "The request is aborted by a higher priority request.")

    async def abort_as_200(self, http, request):
        return aborted(request)

    async def waiting_timeout(self, http, request):
        return refusal(503, "Request waiting timeout reached.")

    async def bare_503(self, http, request):
        return web.Response(status=503)

    async def broken_503(self, http, request):
        return refusal(503, "Model is not configured.")

    async def garbage(self, http, request):
        return web.Response(text="<html>no json</html>")

    async def bad_request(self, http, request):
        return web.json_response({"error": {"message": "The input is too long."}}, status=400)

    async def wrong_count(self, http, request):
        return web.json_response([sample(request)])

    async def foreign_epoch(self, http, request):
        samples = [sample(request) for _ in range(2)]
        for each in samples:
            each["meta_info"]["weight_versions"][0]["version"] = f"e{EPOCH + 1}.u0"
        return web.json_response(samples)

    async def old_weights(self, http, request):
        samples = [sample(request) for _ in range(2)]
        for each in samples:
            each["meta_info"]["weight_versions"][0]["version"] = f"e{EPOCH - 1}.u9"
        return web.json_response(samples)


@asynccontextmanager
async def listening(engine, port=0):
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    # Handlers are cancelled when their client is gone, as a serving engine notices it too.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine_with(fault):
    engine = ScriptedEngine(fault)
    async with (
        listening(engine) as port,
        HttpEngineClient(f"http://127.0.0.1:{port}") as client,
    ):
        yield engine, client


def prompt(prompt_id):
    return Prompt(
        id=prompt_id, token_ids=(1, prompt_id.index), text="", answer=None, verifier="none"
    )


def live_run(client, **settings):
    return LiveRun(
        client, INFO, num_prompts=NUM_PROMPTS, prompt=prompt, max_staleness=4, **settings
    )


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("reset", "transport"),
        ("closed_mid_answer", "transport"),
        ("status_429", "overload"),
        ("queue_full", "overload"),
        ("evicted", "overload"),
        ("abort_as_200", "overload"),
        ("waiting_timeout", "timeout"),
    ],
)
async def test_a_recoverable_failure_costs_one_attempt_and_nothing_else(fault, kind):
    async with engine_with(fault) as (engine, client):
        run = live_run(client)
        async with run.running():
            taken = await run.train()
    values = run.errors.values()
    failed = {k: values[f"errors/{k}_groups"] for k in (
        "transport", "overload", "unavailable", "timeout"
    )}  # fmt: skip
    assert failed == {**dict.fromkeys(failed, 0), kind: 1}
    attempts = {g.prompt.id.index: g.attempt for c in taken for g in c.groups}
    assert attempts == {index: 1 + (index == VICTIM) for index in range(NUM_PROMPTS)}
    assert len(engine.seen) == NUM_PROMPTS + 1, "generation is not repeated by the client"
    counts = run.ledger.counts()
    assert (counts.consumed, counts.requeued, counts.pending) == (NUM_PROMPTS, 1, 0)
    (row,) = [row for row in run.rows if row["kind"] == "failure"]
    assert (row["class"], row["prompt"], row["attempt"]) == (kind, f"0:{VICTIM}", 1)


async def test_a_hanging_request_is_a_timeout_at_its_groups_deadline_and_is_let_go():
    async with engine_with("hang") as (engine, client):
        run = live_run(client, waiting_deadline_s=0.2, running_deadline_s=0.2)
        async with run.running():
            taken = await run.train()
    assert run.errors.values()["errors/timeout_groups"] == 1
    assert engine.disconnected == [VICTIM], "the engine sees that nobody waits any more"
    assert sum(len(c.groups) for c in taken) == NUM_PROMPTS


@pytest.mark.parametrize(
    "fault",
    [
        "bare_503", "broken_503", "garbage", "bad_request", "wrong_count", "foreign_epoch",
        "old_weights",
    ],
)  # fmt: skip
async def test_what_no_retry_can_mend_ends_the_run_at_once(fault):
    async with engine_with(fault) as (_, client):
        run = live_run(client)

        async def train():
            async with run.running():
                await run.train()

        with pytest.raises(ExceptionGroup) as raised:
            await train()
    assert raised.group_contains(ContractViolation)
    assert run.errors.values()["errors/fatal"] == 1
    assert run.errors.values()["errors/window_failed_groups"] == 0
    run.ledger.check()
    assert run.ledger.counts().in_flight == 0


async def test_attempts_fail_while_no_server_listens_and_succeed_once_one_does():
    async with listening(ScriptedEngine("reset")) as port:
        pass  # a port that was free a moment ago
    async with HttpEngineClient(f"http://127.0.0.1:{port}") as client:
        run = live_run(client)
        async with run.running():
            await run.wait_until(lambda: run.errors.values()["errors/transport_groups"] >= 5)
            async with listening(ScriptedEngine("reset"), port):
                taken = await run.train()
    assert sum(len(c.groups) for c in taken) == NUM_PROMPTS
    assert run.ledger.counts().consumed == NUM_PROMPTS
