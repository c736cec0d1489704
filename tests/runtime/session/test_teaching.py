"""A teacher's servers against the student, before the first response is scored."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import ClientSession, web
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.teacher import Teacher
from runtime.data.encoder import load_encoder
from runtime.data.samples import Prompt, PromptId, Sample, Span
from runtime.engines.embedded.server import Server
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.scoring_client import HttpScoringClient
from runtime.errors import ConfigError, ContractViolation, ServiceUnavailable
from runtime.policy import PolicyId
from runtime.rollout.teacher import ServedTeacher
from runtime.session import teaching
from runtime.session.teaching import PROBE, Student, check_servers, open_teacher, pieces, token_of
from tests.contracts.tiny_models import SHAPE, VOCAB, byte_tokenizer, save_model, tiny_qwen3

pytestmark = pytest.mark.anyio

PROMPT = Prompt(id=PromptId(0, 0), token_ids=(1, 2), text="", answer=None, verifier="none")
SAMPLE = Sample(
    token_ids=(3, 4),
    logprobs=(-1.0, -1.0),
    spans=(Span(0, 2, PolicyId(1, 0)),),
    prefill=PolicyId(1, 0),
    finish="length",
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "_POLL_S", 0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tiny_qwen3(0), tmp_path_factory.mktemp("teacher"))


def student(folder: Path, **changes: Any) -> Student:
    made: dict[str, Any] = {
        "vocab_size": VOCAB, "encode": load_encoder(folder), "longest": 100,
        "texts": (PROBE, "reverse abc"),
    }  # fmt: skip
    return Student(**(made | changes))


def server(folder: Path, **settings: Any) -> Server:
    return Server(EngineSettings(model_path=str(folder), **settings))


async def check(url: str, wanted: Student, key: str | None = None) -> None:
    async with HttpScoringClient(url, api_key=key, vocab_size=VOCAB) as client:
        await check_servers([client], wanted, deadline_s=60)


async def test_a_teacher_of_the_students_kind_is_taken(folder: Path):
    async with server(folder) as one, server(folder) as other:
        clients = [HttpScoringClient(s.url, vocab_size=VOCAB) for s in (one, other)]
        await check_servers(clients, student(folder), deadline_s=60)
        for client in clients:
            await client.close()


async def test_servers_with_other_contexts_are_one_teacher(folder: Path):
    async with (
        server(folder, context_length=101) as one,
        server(folder, context_length=1000) as other,
    ):
        clients = [HttpScoringClient(s.url, vocab_size=VOCAB) for s in (one, other)]
        await check_servers(clients, student(folder), deadline_s=60)
        for client in clients:
            await client.close()


@pytest.mark.parametrize("first", ["with", "without"])
async def test_servers_with_and_without_a_begin_token_are_one_teacher(
    folder: Path, tmp_path: Path, first: str
):
    begins = byte_tokenizer()
    begins.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    begins.save(str(tmp_path / "tokenizer.json"))
    wanted = student(tmp_path)
    assert len(wanted.encode("ab", True)) == 1 + len(wanted.encode("ab", False))
    async with server(tmp_path) as one, server(folder) as other:
        urls = [one.url, other.url] if first == "with" else [other.url, one.url]
        clients = [HttpScoringClient(url, vocab_size=VOCAB) for url in urls]
        await check_servers(clients, wanted, deadline_s=60)
        for client in clients:
            await client.close()


async def test_another_vocabulary_a_short_context_and_another_tokenizer_are_named(
    folder: Path, tmp_path: Path
):
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    async with server(folder, context_length=128) as one:
        with pytest.raises(ConfigError, match=f"a vocabulary of {VOCAB}, the student 300"):
            await check(one.url, student(folder, vocab_size=300))
        with pytest.raises(ConfigError, match=r"a context of 128 tokens.*need 129"):
            await check(one.url, student(folder, longest=128))
        with pytest.raises(ConfigError, match=r"another tokenizer.*the first other one at 0"):
            await check(one.url, student(folder, encode=load_encoder(tmp_path)))


async def test_two_models_behind_one_teacher_are_refused(folder: Path, tmp_path: Path):
    strange = save_model(tiny_qwen3(5), tmp_path)
    async with server(folder) as one, server(strange) as other:
        clients = [HttpScoringClient(s.url, vocab_size=VOCAB) for s in (one, other)]
        with pytest.raises(ConfigError, match="are not the same model"):
            await check_servers(clients, student(folder), deadline_s=60)
        for client in clients:
            await client.close()


async def test_a_server_without_a_tokenizer_cannot_be_compared(tmp_path: Path, folder: Path):
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(tmp_path)
    async with server(tmp_path) as one:
        with pytest.raises(ConfigError, match=r"no server of SGLang's contract.*tokenizer"):
            await check(one.url, student(folder))


async def test_the_token_is_sent_and_stands_in_no_error(folder: Path):
    async with server(folder, api_key="hush-hush") as one:
        await check(one.url, student(folder), "hush-hush")
        with pytest.raises(ConfigError, match=r"teacher\.token_env") as caught:
            await check(one.url, student(folder), "open-sesame")
    assert "sesame" not in str(caught.value)
    assert "hush" not in str(caught.value)


async def test_what_is_no_engine_is_named_as_such(folder: Path):
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.add_routes([web.get("/{any:.*}", hello), web.post("/{any:.*}", hello)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        with pytest.raises(ConfigError, match="no server of SGLang's contract"):
            await check(f"http://127.0.0.1:{port}", student(folder))
    finally:
        await runner.cleanup()


class Gateway:
    """Stands in front of a server and answers in its place while ``answers`` lasts.

    Each is a status with a body, or a finish reason that replaces the server's own.
    """

    def __init__(self, behind: str, *, only: str = "") -> None:
        self._behind = behind
        self._only = only
        self.answers: list[tuple[int, str, str] | dict[str, Any]] = []
        self.num_asked = 0

    async def pass_on(self, request: web.Request) -> web.Response:
        raw = await request.read()
        answer = None
        if request.path.startswith(self._only):
            self.num_asked += 1
            answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, tuple):
            status, kind, text = answer
            return web.Response(status=status, text=text, content_type=kind)
        async with (
            ClientSession() as http,
            http.request(request.method, self._behind + request.path, data=raw) as found,
        ):
            if found.content_type != "application/json":
                return web.Response(status=found.status, text=await found.text())
            body = await found.json()
        if answer is not None:
            body["meta_info"]["finish_reason"] = answer
        return web.json_response(body, status=found.status)

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        app = web.Application()
        app.add_routes([web.route("*", "/{any:.*}", self.pass_on)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


HTML = "<html><body>upstream connect error</body></html>"
ABORTS: list[dict[str, Any]] = [
    {"type": "abort"},
    {"type": "abort", "message": "Aborted"},
    {"type": "abort", "message": "The server is restarting.", "status_code": 503},
]


@pytest.mark.parametrize("path", ["/server_info", "/milepost", "/generate"])
async def test_a_gateway_without_its_server_is_waited_for_at_the_start(folder: Path, path: str):
    async with server(folder) as one:
        gateway = Gateway(one.url, only=path)
        async with gateway.listening() as url:
            gateway.answers = [(503, "text/html", HTML), (502, "application/json", "upstream")]
            gateway.answers += ABORTS[:1] if path == "/generate" else [(504, "text/plain", "")]
            await check(url, student(folder, texts=("reverse abc",)))
            assert gateway.answers == []
            assert gateway.num_asked >= 4


async def test_a_gateway_whose_server_stays_away_is_a_service_that_may_come(folder: Path):
    gateway = Gateway("http://127.0.0.1:1")
    gateway.answers = [(503, "text/html", HTML)] * 1000
    async with gateway.listening() as url, HttpScoringClient(url, vocab_size=VOCAB) as client:
        with pytest.raises(ServiceUnavailable, match=r"did not answer within 0\.5 s"):
            await check_servers([client], student(folder), deadline_s=0.5)


@pytest.mark.parametrize(
    "answer",
    [(status, "text/html", HTML) for status in (429, 502, 503, 504)] + ABORTS,
    ids=str,
)
async def test_a_response_is_scored_though_a_gateway_answers_first(folder: Path, answer: Any):
    async with server(folder) as one:
        gateway = Gateway(one.url)
        async with gateway.listening() as url, HttpScoringClient(url, vocab_size=VOCAB) as client:
            pauses: list[float] = []

            async def pause(seconds: float) -> None:
                pauses.append(seconds)

            teacher = ServedTeacher([client], top_k=0, deadline_s=60, concurrency=4, pause=pause)
            gateway.answers = [answer]
            (scores,) = await teacher.score(PROMPT, [SAMPLE])
            assert len(scores.arrays(2)[0]) == 2
            assert (len(pauses), gateway.num_asked) == (1, 2)


@pytest.mark.parametrize(
    "answer",
    [
        (400, "text/html", HTML),
        (500, "text/html", HTML),
        {"type": "abort", "message": "too long", "status_code": 400},
        {"type": "strange"},
    ],
    ids=str,
)
async def test_what_no_retry_can_mend_is_not_asked_for_again(folder: Path, answer: Any):
    async with server(folder) as one:
        gateway = Gateway(one.url)
        async with gateway.listening() as url, HttpScoringClient(url, vocab_size=VOCAB) as client:
            teacher = ServedTeacher([client], top_k=0, deadline_s=60, concurrency=4)
            gateway.answers = [answer]
            with pytest.raises(ContractViolation):
                await teacher.score(PROMPT, [SAMPLE])
            assert gateway.num_asked == 1


async def test_nobody_there_is_a_service_that_may_come(folder: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listened on: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with HttpScoringClient(url, vocab_size=VOCAB) as client:
            with pytest.raises(ServiceUnavailable, match=f"{url} did not answer within 0.5 s"):
                await check_servers([client], student(folder), deadline_s=0.5)


def test_a_token_comes_from_the_environment_or_the_run_does_not_start():
    assert token_of(Teacher(url=("http://x",)), {}) is None
    teacher = Teacher(url=("http://x",), token_env="TEACHER_TOKEN")
    assert token_of(teacher, {"TEACHER_TOKEN": "s"}) == "s"
    for environ in ({}, {"TEACHER_TOKEN": ""}):
        with pytest.raises(ConfigError, match=r'token_env = "TEACHER_TOKEN".*no such variable'):
            token_of(teacher, environ)


async def test_a_session_opens_the_teacher_of_its_run_file(folder: Path, monkeypatch: Any):
    monkeypatch.setenv("TEACHER_TOKEN", "hush")
    prepared: Any = SimpleNamespace(tokenizer=str(folder), longest_prompt_tokens=8)
    async with server(folder, api_key="hush") as one:
        teacher = Teacher(url=(one.url,), token_env="TEACHER_TOKEN", top_k=3)
        spec: Any = SimpleNamespace(
            teacher=teacher, rollout=SimpleNamespace(max_response_tokens=16)
        )
        async with open_teacher(spec, prepared, vocab_size=VOCAB, prompt="hello") as opened:
            assert opened is not None
            (scores,) = await opened.score(PROMPT, [SAMPLE])
            assert (scores.top_k, len(scores.arrays(2)[1])) == (3, 6)
    spec = SimpleNamespace(teacher=None)
    async with open_teacher(spec, prepared, vocab_size=VOCAB, prompt="") as nobody:
        assert nobody is None


@pytest.mark.parametrize("room", [1, 2, 7, 50, 1000])
def test_a_text_is_read_whole_in_pieces_that_fit(folder: Path, room: int):
    encode = load_encoder(folder)
    found = list(pieces(PROBE, encode, room))
    assert all(0 < len(encode(piece, True)) <= room for piece in found)
    if room >= 7:
        assert "".join(found) == PROBE


def test_both_sides_of_the_probe_are_read_alike(folder: Path):
    assert load_encoder(folder)(PROBE, False) == byte_tokenizer().encode(PROBE).ids
