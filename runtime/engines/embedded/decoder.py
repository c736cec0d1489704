"""Continuous batching over slots: requests join and leave, and weights change, between steps.

Why not transformers' ContinuousBatchingManager, the first candidate: it has log-probs, streaming
and a pause that keeps KV, but no policy spans, no retraction (so no way to drop old KV under
running requests), no deadlines and no queue limit; all of that would have to be built around its
private state. It is also slow for small models. Tokens per CPU second for the laptop's model
(hidden 96, 3 layers; 256 prompts of 6 tokens, 6 new ones each; one core, nearly quiet): HF
``generate`` 23k, the manager 6.5k (0.9k on its first batch), this decoder 46k over HF's forward and
48k with ``fused``, whose gain is larger in smaller batches. So: slots, and either forward under
them.

The rest of the design follows from three demands. Spans: a request holds marks (first token, weight
version), set when it is admitted and whenever the version changes while it runs. Cheap steps:
settings and positions are numpy columns by slot, a step is one forward, one draw and a dozen array
operations, and lists are made only when a request ends. Shared prompts: equal prompts that are
admitted together are read once, and remembered for siblings that come later.

Memory: every request needs prompt + max_new_tokens positions, reserved on admission, so nothing has
to be taken from a running request later on.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.engines.embedded.cache import rounded
from runtime.engines.embedded.forward import Decode, HfForward, slot_cache
from runtime.engines.embedded.fused import fused_decode
from runtime.engines.embedded.prefix import PrefixStore, PromptKey, ReadPrompt
from runtime.engines.embedded.requests import Request
from runtime.engines.embedded.sampling import (
    GREEDY_BELOW,
    SamplingRows,
    sample,
    sibling_seed,
    uniforms,
)

PREFILL_TOKENS = 8192
"""Padded prompt tokens read by one forward."""


class Decoder:
    """A batch of running requests. Not thread-safe: one thread owns it.

    Args:
        model: an HF causal LM in eval mode (see ``forward.load_model``).
        max_running: most requests at once.
        context_length: most tokens of prompt and response together.
        max_total_tokens: KV positions of all slots together (slots x longest request).
        prefix_bytes: memory for prompts that may come again.
        text: token ids to text, for stop strings; None where there is no tokenizer.
        seed: of the seeds given to requests that bring none; None: from the operating system.
        use_fused: take the written-out step where the model allows it.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_running: int,
        context_length: int,
        max_total_tokens: int,
        prefix_bytes: int = 64 * 2**20,
        text: Callable[[list[int]], str] | None = None,
        seed: int | None = None,
        use_fused: bool = True,
    ) -> None:
        self.version = "default"
        self.num_running = 0
        self.generated_tokens = 0
        self.context_length = context_length
        self.max_running = max_running
        self.max_total_tokens = max_total_tokens
        self.prefixes = PrefixStore(prefix_bytes)
        self._cache = slot_cache(model)
        self._hf = HfForward(model, self._cache)
        fused = None
        if use_fused:
            fused = fused_decode(model, self._cache, self._hf, max_length=rounded(context_length))
        self.is_fused = fused is not None
        self._decode: Decode = fused or self._hf
        self._vocab = int(model.config.get_text_config().vocab_size)
        self._text = text
        self._rng = np.random.default_rng(seed)
        self._slots: list[Request] = []
        self._rows = SamplingRows.empty(max_running)
        self._position = np.zeros(max_running, np.int64)
        """KV positions filled, which is where the newest token goes."""
        self._newest = np.zeros(max_running, np.int64)
        self._count = np.zeros(max_running, np.int64)
        """Tokens of the response so far."""
        self._limit = np.zeros(max_running, np.int64)
        self._need = np.zeros(max_running, np.int64)
        """Positions reserved."""
        self._stops = np.full((max_running, 1), -1, np.int64)
        self._tokens = np.zeros((max_running, 0), np.int64)
        self._logprobs = np.zeros((max_running, 0), np.float32)
        self._num_stop_strings = 0

    # Admission

    def num_that_fit(self, waiting: Iterable[Request]) -> int:
        """How many of the first ``waiting`` requests can be admitted together now.

        One always can when nothing runs, however long it is: else it would wait for ever.
        """
        running, need, count = self.num_running, 0, 0
        if running:
            need = int(self._need[:running].max())
        for request in waiting:
            need = max(need, _need(request))
            together = running + count + 1
            if together > self.max_running:
                break
            if together > 1 and together * rounded(need) > self.max_total_tokens:
                break
            count += 1
        return count

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> list[Request]:
        """Read the prompts, draw each request's next token, and let them join the batch.

        Args:
            requests: no more than ``num_that_fit``.

        Returns:
            Those that ended with that token.
        """
        first = self.num_running
        self._grow(requests)
        for request in requests:
            self._seat(request)
        logits = self._read(requests, first)
        self.num_running = first + len(requests)
        return self._take(slice(first, self.num_running), logits)

    def _seat(self, request: Request) -> None:
        slot, params = len(self._slots), request.params
        self._slots.append(request)
        request.slot = slot
        request.mark(len(request.output), self.version)
        rows = self._rows
        rows.greedy[slot] = params.temperature < GREEDY_BELOW or params.top_k == 1
        rows.temperature[slot] = 1.0 if params.temperature < GREEDY_BELOW else params.temperature
        rows.top_p[slot], rows.min_p[slot] = params.top_p, params.min_p
        rows.top_k[slot] = params.top_k if params.top_k > 0 else self._vocab
        rows.filtered[slot] = (
            params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < self._vocab
        )
        if request.seed_drawn is None:
            seed = params.seed
            request.seed_drawn = (
                int(self._rng.integers(2**63))
                if seed is None
                else sibling_seed(seed, request.sibling)
            )
        rows.seed[slot] = request.seed_drawn
        self._position[slot] = len(request.prompt) + len(request.output)
        self._count[slot], self._limit[slot] = len(request.output), params.max_new_tokens
        self._need[slot] = _need(request)
        self._stops[slot] = -1
        self._stops[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._tokens[slot, : len(request.output)] = request.output
        self._logprobs[slot, : len(request.output)] = request.logprobs
        self._num_stop_strings += bool(params.stop)

    def _read(self, requests: Sequence[Request], first: int) -> Tensor:
        """Fill the KV of slots ``first``.. and return the logits [len(requests), V] after each."""
        places: dict[PromptKey, list[int]] = {}
        for i, request in enumerate(requests):
            key = (request.salt, (*request.prompt, *request.output))
            places.setdefault(key, []).append(i)
        logits: dict[int, Tensor] = {}
        unread: list[PromptKey] = []
        for key, members in places.items():
            known = self.prefixes.get(key)
            if known is None:
                unread.append(key)
                new = members[1:]
            else:
                slots = np.asarray(members, np.int64) + first
                self._cache.fill(slots, np.zeros(len(members), np.int64), known.kv)
                logits[members[0]] = known.logits_V
                new = members
            for i in new:
                requests[i].cached_tokens = len(key[1]) - 1
        for keys in _chunks(unread):
            after_PV, kv = self._hf.prefill([tokens for _, tokens in keys])
            slots = np.asarray([i + first for key in keys for i in places[key]], np.int64)
            rows = np.repeat(np.arange(len(keys)), [len(places[key]) for key in keys])
            self._cache.fill(slots, rows, kv)
            for row, key in enumerate(keys):
                self.prefixes.put(key, ReadPrompt(kv.row(row, len(key[1])), after_PV[row].clone()))
                logits[places[key][0]] = after_PV[row]
        for request in requests:
            if request.logprob_start >= 0 and request.input_logprobs is None:
                self._score(request)
        leader = np.empty(len(requests), np.int64)
        for members in places.values():
            leader[members] = members[0]
        order = {i: row for row, i in enumerate(logits)}
        which = torch.tensor([order[int(i)] for i in leader])
        return torch.stack(list(logits.values()))[which]

    def _score(self, request: Request) -> None:
        """Log-probs of the prompt's own tokens, and of the likeliest in their places."""
        request.input_logprobs = []
        if len(request.prompt) < 2:
            return
        logprob_TV = self._hf.score(request.prompt)
        token_T1 = torch.tensor(request.prompt[1:])[:, None]
        request.input_logprobs = logprob_TV.gather(1, token_T1).squeeze(1).tolist()
        if request.num_top:
            top = logprob_TV[request.logprob_start :].topk(request.num_top, dim=-1)
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            request.input_top = list(pairs)

    # Steps

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Give every running request its next token.

        Returns:
            Those that ended with it; they have left their slots.
        """
        used = self.num_running
        if used == 0:
            return []
        position = self._position[:used]
        length = rounded(int(position.max()) + 1)
        logits = self._decode(
            torch.from_numpy(self._newest[:used].copy()), torch.from_numpy(position.copy()), length
        )
        position += 1
        return self._take(slice(0, used), logits)

    def _take(self, at: slice, logits_BV: Tensor) -> list[Request]:
        """Draw and record one token for the slots ``at``; end those that are done."""
        count = self._count[at]
        token_B, logprob_B = sample(logits_BV, self._rows, at, uniforms(self._rows.seed[at], count))
        token, logprob = token_B.numpy(), logprob_B.numpy()
        slots = np.arange(at.start, at.stop)
        self._newest[at] = token
        self._tokens[slots, count] = token
        self._logprobs[slots, count] = logprob
        count += 1
        self.generated_tokens += len(slots)
        full = count >= self._limit[at]
        stopped = (self._stops[at] == token[:, None]).any(1)
        matched = self._matched_strings(at) if self._num_stop_strings else {}
        done = full | stopped
        if matched:
            done[[slot - at.start for slot in matched]] = True
        if not done.any():
            return []
        ended = slots[done]
        finished = [self._slots[slot] for slot in ended]
        for slot, request in zip(ended.tolist(), finished, strict=True):
            # SGLang looks at the length first: an end token on the last place is a "length".
            if full[slot - at.start]:
                request.finish = {"type": "length", "length": int(self._count[slot])}
            elif stopped[slot - at.start]:
                request.finish = {"type": "stop", "matched": int(self._newest[slot])}
            else:
                request.finish = {"type": "stop", "matched": matched[slot]}
        self._leave(ended)
        return finished

    def _matched_strings(self, at: slice) -> dict[int, str]:
        """Slots whose text now ends a stop string, and which."""
        found: dict[int, str] = {}
        for slot in range(at.start, at.stop):
            stops = self._slots[slot].params.stop
            if not stops or self._text is None:
                continue
            # A token has at least one character, so this many tokens hold any match.
            first = max(0, int(self._count[slot]) - max(map(len, stops)) - 1)
            tail = self._text(self._tokens[slot, first : self._count[slot]].tolist())
            for stop in stops:
                if stop in tail:
                    found[slot] = stop
                    break
        return found

    # Leaving

    @torch.inference_mode()
    def evict(self, requests: Sequence[Request]) -> None:
        """Take running requests out of the batch; what they have stays in the request."""
        if requests:
            self._leave(np.sort(np.asarray([r.slot for r in requests], np.int64)))

    def running(self) -> list[Request]:
        """All running requests, by slot."""
        return list(self._slots)

    def progress(self, request: Request) -> tuple[list[int], list[float]]:
        """Tokens and log-probs a running request has so far."""
        count = int(self._count[request.slot])
        slot = request.slot
        return self._tokens[slot, :count].tolist(), self._logprobs[slot, :count].tolist()

    def _leave(self, slots: NDArray[np.int64]) -> None:
        """Free ``slots`` (ascending): store their outputs, then close the gaps from the end."""
        for slot in slots.tolist():
            request = self._slots[slot]
            request.output, request.logprobs = self.progress(request)
            request.version = self.version
            request.slot = -1
            self._num_stop_strings -= bool(request.params.stop)
        left = self.num_running - len(slots)
        gone = np.zeros(self.num_running, np.bool_)
        gone[slots] = True
        to = slots[slots < left]
        from_ = np.flatnonzero(~gone[left:]) + left
        if to.size:
            self._cache.move(from_, to, rounded(int(self._position[from_].max()) + 1))
            for column in (*self._rows.arrays(), *self._columns()):
                column[to] = column[from_]
            for source, target in zip(from_.tolist(), to.tolist(), strict=True):
                self._slots[target] = self._slots[source]
                self._slots[target].slot = target
        del self._slots[left:]
        self.num_running = left

    def _columns(self) -> list[NDArray[Any]]:
        return [
            self._position, self._newest, self._count, self._limit, self._need,
            self._stops, self._tokens, self._logprobs,
        ]  # fmt: skip

    # Weights

    def rename(self, version: str) -> None:
        """From the next token on, weights are called ``version``."""
        self.version = version
        for slot, request in enumerate(self._slots):
            request.mark(int(self._count[slot]), version)

    def used_share(self) -> float:
        """Share of the KV pool that running requests have filled, 0..1."""
        return float(self._position[: self.num_running].sum()) / self.max_total_tokens

    def probe(self) -> None:
        """Generate one token outside the batch; raises what the model raises."""
        with torch.inference_mode():
            self._hf.prefill([[0]])

    def _grow(self, requests: Sequence[Request]) -> None:
        """Make room for these requests beside those that run."""
        slots = self.num_running + len(requests)
        need = max(_need(r) for r in requests)
        if slots > self._cache.num_slots or need > self._cache.length:
            # Slots double and lengths grow by half, so that copies stay few.
            slots = min(self.max_running, max(slots, 2 * self._cache.num_slots, 8))
            grown = min(self.context_length, self._cache.length + self._cache.length // 2)
            self._cache.reserve(slots, max(need, grown))
        width = max(r.params.max_new_tokens for r in requests)
        if width > self._tokens.shape[1]:
            self._tokens = _wider(self._tokens, width, 0)
            self._logprobs = _wider(self._logprobs, width, 0)
        stops = max(len(r.params.stop_token_ids) for r in requests)
        if stops > self._stops.shape[1]:
            self._stops = _wider(self._stops, stops, -1)


def _need(request: Request) -> int:
    """KV positions a request can come to need."""
    return len(request.prompt) + request.params.max_new_tokens


def _chunks(keys: list[PromptKey]) -> list[list[PromptKey]]:
    """Prompts in order of length, cut so that each forward reads at most PREFILL_TOKENS."""
    chunks: list[list[PromptKey]] = []
    for key in sorted(keys, key=lambda k: len(k[1])):
        if chunks and (len(chunks[-1]) + 1) * len(key[1]) <= PREFILL_TOKENS:
            chunks[-1].append(key)
        else:
            chunks.append([key])
    return chunks


def _wider(array: NDArray[Any], width: int, filler: int) -> NDArray[Any]:
    new = np.full((array.shape[0], width), filler, array.dtype)
    new[:, : array.shape[1]] = array
    return new
