"""An embedded engine without its HTTP side: model, decoder thread, weights and broadcast groups.

Calls wait in tickets; the decoder's thread reports once per step, and the event loop hands what
came to the tickets. All methods are called on the event loop's thread.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer

from runtime.engines.collective import CollectiveGroup
from runtime.engines.embedded.adapters import AdapterSlot
from runtime.engines.embedded.bodies import Call, Rules
from runtime.engines.embedded.decoder import Decoder
from runtime.engines.embedded.forward import load_model
from runtime.engines.embedded.scheduler import Progress, Scheduler
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.embedded.weights import Weights

T = TypeVar("T")


class Ticket:
    """What one call waits for: its requests' ends, and their newest progress when it streams."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.newest: dict[str, Progress] = {}
        self._missing = len(call.requests)
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Every request of the call has ended."""
        return self._missing == 0

    def put(self, progress: Progress) -> None:
        """Take a report; the newest one of a request replaces the one before."""
        self.newest[progress.request.rid] = progress
        self._missing -= progress.finish is not None
        if self.is_over or self.call.stream:
            self._news.set()

    async def wait(self) -> None:
        """Until there is news: any for a streaming call, the end for others.

        No deadline here: the engine's limits and the client's own end the wait.
        """
        await self._news.wait()
        self._news.clear()

    def take(self) -> list[Progress]:
        """All news since the last call."""
        news = list(self.newest.values())
        self.newest.clear()
        return news


class Engine:
    """Loads the model and starts the decoder's thread. Use inside a running event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        torch.set_num_threads(settings.torch_threads)
        self.settings = settings
        self.model = load_model(settings.model_path, settings.dtype)
        self.model_path = settings.model_path
        self.started_at = time.time()
        self.session_open = False
        """Between /begin_weight_update and /end_weight_update."""
        self.groups: dict[str, CollectiveGroup] = {}
        self.on_death: Callable[[], None] = lambda: None
        """Called on the loop when the decoder's thread has ended by an error."""
        self.tokenizer = _tokenizer(settings.model_path)
        self.rules = _rules(self.model, settings, self.tokenizer)
        self.weights = Weights(self.model)
        self.adapter = AdapterSlot(self.weights)
        self.decoder = Decoder(
            self.model,
            max_running=settings.max_running_requests,
            context_length=self.rules.context_length,
            max_total_tokens=settings.max_total_tokens or _positions(self.model, settings.kv_bytes),
            prefix_bytes=settings.prefix_bytes,
            text=self.text if self.tokenizer else None,
            seed=settings.seed,
        )
        self.decoder.version = settings.weight_version
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[str, Ticket] = {}
        self.scheduler = Scheduler(
            self.decoder,
            self._deliver,
            max_queued=settings.max_queued_requests,
            waiting_timeout_s=settings.waiting_timeout_s,
            running_timeout_s=settings.running_timeout_s,
            on_failure=self._report_death,
        )
        # Reading files and waiting for broadcasts; two, so that a bucket that never comes does not
        # keep its group from being destroyed.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="weights")
        self.scheduler.start()

    # Generation

    def open(self, call: Call) -> Ticket:
        """Queue a call's requests.

        Raises:
            QueueFull, DuplicateRid, EngineStopped: see ``Scheduler.submit``; nothing was queued.
        """
        ticket = Ticket(call)
        to_run = [r for r in call.requests if r.params.max_new_tokens > 0]
        if to_run:
            self.scheduler.submit(to_run)
        # No report can overtake this: they arrive on this thread's loop.
        self._tickets.update((r.rid, ticket) for r in to_run)
        for request in call.requests:
            if request.params.max_new_tokens == 0:
                request.finish = {"type": "length", "length": 0}
                request.version = self.decoder.version
                ticket.put(Progress(request, [], [], request.finish))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Forget a ticket; what still runs of it is aborted."""
        left = {r.rid for r in ticket.call.requests if self._tickets.pop(r.rid, None)}
        if left and self.scheduler.is_alive:
            self.scheduler.between_steps(partial(self.scheduler.abort, left))

    def rids_named(self, rid: str) -> set[str]:
        """The requests that an id given by a client stands for."""
        return {
            request.rid
            for ticket in set(self._tickets.values())
            for request in ticket.call.requests
            if rid in (request.rid, ticket.call.rid)
        }

    def text(self, tokens: list[int]) -> str:
        """Tokens as text, special ones left out; empty without a tokenizer."""
        return self.tokenizer.decode(tokens) if self.tokenizer else ""

    def _deliver(self, progress: list[Progress]) -> None:
        """From the decoder's thread."""
        try:
            self._loop.call_soon_threadsafe(self._hand_out, progress)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _report_death(self) -> None:
        """From the decoder's thread."""
        self._loop.call_soon_threadsafe(lambda: self.on_death())

    def _hand_out(self, progress: list[Progress]) -> None:
        for report in progress:
            rid = report.request.rid
            ticket = (
                self._tickets.get(rid) if report.finish is None else self._tickets.pop(rid, None)
            )
            if ticket is not None:
                ticket.put(report)

    # Control

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the decoder's thread between two steps."""
        return await asyncio.wrap_future(self.scheduler.between_steps(work))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking ``work`` (files, broadcasts) beside the loop."""
        return await self._loop.run_in_executor(self._threads, work)

    async def alive(self) -> bool:
        """Whether tokens come: those of running requests, or one asked for here. Raises nothing."""
        before = self.decoder.generated_tokens

        def probe() -> None:
            if self.decoder.generated_tokens == before:
                self.decoder.probe()

        try:
            async with asyncio.timeout(self.settings.probe_timeout_s):
                await self.between_steps(probe)
        except Exception:  # whatever it is, the engine does not generate
            return False
        return True

    def stop(self) -> None:
        """End the thread and leave all groups."""
        for group in self.groups.values():
            group.close()
        self.groups.clear()
        self.scheduler.stop(timeout_s=5.0)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _tokenizer(model_path: str) -> Tokenizer | None:
    file = Path(model_path) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _rules(model: Any, settings: EngineSettings, tokenizer: Tokenizer | None) -> Rules:
    config = model.config.get_text_config()
    own = int(getattr(config, "max_position_embeddings", 0) or 2**31)
    eos = model.generation_config.eos_token_id if model.can_generate() else config.eos_token_id
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return Rules(
        vocab_size=int(config.vocab_size),
        context_length=min(own, settings.context_length or own),
        eos_token_ids=tuple(int(i) for i in ids),
        encode=(lambda text: list(tokenizer.encode(text).ids)) if tokenizer else None,
    )


def _positions(model: Any, kv_bytes: int) -> int:
    """KV positions that fit ``kv_bytes``."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    per_position = 2 * int(config.num_hidden_layers) * kv_heads * dim * model.dtype.itemsize
    return max(16, kv_bytes // per_position)
