"""Prompts, an engine without a server, and a verifier: what an evaluation runs against."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from configs import evaluation as section
from runtime.clock import ManualClock, SystemClock
from runtime.data.samples import Prompt, PromptId, Span
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, EngineInfo, GenerateRequest, Generation
from runtime.evaluation.items import ItemLog
from runtime.evaluation.sets import EvaluationSet
from runtime.evaluation.shared import EvaluationLimits, FrozenSet, SharedRunner
from runtime.policy import PolicyId
from runtime.rollout.gate import AdmissionGate

POLICY = PolicyId(1, 4)
INFO = EngineInfo(
    version="test", vocab_size=32, context_length=64, max_running_requests=8,
    native_spans=True, takes_salt=True, update_bracket=False,
)  # fmt: skip


class Prompts:
    """Keeps of the store: a length, and the same prompt for the same row."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts

    def __len__(self) -> int:
        return self._num_prompts

    def prompt(self, prompt_id: PromptId) -> Prompt:
        return Prompt(
            id=prompt_id, token_ids=(prompt_id.index + 1,), text="", answer=None, verifier="v"
        )


class Engine:
    """Keeps of the client: ``n`` answers in order or an error, at a policy; counts calls."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.requests: list[GenerateRequest] = []
        self.fail: Callable[[int, int], Exception | None] = lambda row, call: None
        """(row, its calls so far) -> the error of this call."""
        self.hangs_at: set[int] = set()
        self.reached = anyio.Event()

    async def generate(self, request: GenerateRequest, *, deadline_s: float) -> list[Generation]:
        row = request.input_ids[0] - 1
        self.requests.append(request)
        call = self.calls[row]
        self.calls[row] += 1
        await anyio.lowlevel.checkpoint()
        if row in self.hangs_at:
            self.reached.set()
            await anyio.sleep_forever()
        if (error := self.fail(row, call)) is not None:
            raise error
        one = Generation(
            token_ids=(row, 7), logprobs=(-0.5, -0.5), spans=(Span(0, 2, POLICY),),
            prefill=POLICY, finish="stop",
        )  # fmt: skip
        return [one] * request.n

    async def close(self) -> None:
        pass


class Verifier:
    """Reward 1 for even rows; raises what it is told."""

    def __init__(self) -> None:
        self.fail: Callable[[int], Exception | None] = lambda row: None

    async def judge(self, prompt: Prompt, texts: list[str]) -> list[float]:
        await anyio.lowlevel.checkpoint()
        if (error := self.fail(prompt.id.index)) is not None:
            raise error
        return [float(prompt.id.index % 2 == 0)] * len(texts)


class Asked:
    """One evaluation of ``num_prompts`` rows, one sample each."""

    def __init__(self, folder: Path, num_prompts: int = 6, **limits: Any) -> None:
        self.engine = Engine()
        self.verifier = Verifier()
        clock = ManualClock()
        self.pool = EnginePool(1, clock=clock)
        self.pool.joined(
            EngineAddress(slot=0, incarnation="a", url="", pid=1),
            INFO,
            self.engine,  # type: ignore[arg-type]
        )
        self.pool.mark_verified(0, "a", POLICY)
        self.pool.serve(POLICY)
        self.gate = AdmissionGate(clock=SystemClock())
        given = section.EvaluationSet.model_validate({"prompts": "/held.jsonl"})
        asked = EvaluationSet.from_config("held", given, verifier="v", max_response_tokens=4)
        self.frozen = FrozenSet(asked=asked, store=Prompts(num_prompts), digest="d" * 64)  # type: ignore[arg-type]
        self.runner = SharedRunner(
            pool=self.pool,
            gate=self.gate,
            judge=self.verifier,
            decode=str,
            limits=EvaluationLimits(
                **{
                    "deadline_s": 30.0,
                    "drain_deadline_s": 5.0,
                    "call_deadline_s": 5.0,
                    "skip_share": 0.0,
                    "backoff_s": 0.0,
                    **limits,
                }
            ),
            clock=clock,
            attempt=1,
            epoch=1,
        )
        self.log = ItemLog(folder / "items.jsonl", set_digest=self.frozen.digest, policy="e1.u4")

    def with_samples(self, samples: int, temperature: float) -> None:
        sampling = replace(self.frozen.asked.sampling, temperature=temperature)
        asked = replace(self.frozen.asked, samples=samples, pass_at=1, sampling=sampling)
        self.frozen = replace(self.frozen, asked=asked)

    async def run(self) -> dict[str, float]:
        return await self.runner.run(self.frozen, POLICY, self.log)
