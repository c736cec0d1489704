"""What an engine is to the rest: an HTTP address that speaks one contract, and an owner.

The wire contract is SGLang's; docs/engine-contract.md records it and the differences between
implementations. The client is one class for all engines; the owner differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from runtime.data.routed import RoutedExperts, RouterShape
from runtime.data.samples import Span
from runtime.policy import PolicyId

if TYPE_CHECKING:
    from runtime.engines.shared import SharedBucket

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 switches it off."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """Same seed, prompt and policy: same tokens, where the engine can. None: its own RNG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One call of ``POST /generate``: ``n`` samples of one prompt."""

    rid: str
    """Unique per call; ``abort`` takes it."""
    input_ids: tuple[int, ...]
    sampling: SamplingSettings
    n: int = 1
    salt: str | None = None
    """Prefix-cache key, the policy id where the engine takes one."""
    router: RouterShape | None = None
    """Ask which experts read each token; the model's shape, by which the answer is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One response as the engine reported it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    """Tile [0, len(token_ids)). Engines without native spans give one."""
    prefill: PolicyId
    finish: Literal["stop", "length", "abort"]
    """``abort``: the response is partial (or empty); its message is in ``abort_message``."""
    abort_message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    routed: RoutedExperts | None = None
    """Choices of experts for prompt and response; None unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine is doing now."""

    running: int
    waiting: int
    token_usage: float
    """Share of the KV pool in use, 0..1."""
    generated_tokens: int | None = None
    """Tokens generated since start; None where the engine does not count. Progress is life."""


WeightHash = Literal["sha256", "mix64"]
"""How an engine hashes a weight: first 64 bits of SHA-256, or ``runtime.publication.mix64``, which
a GPU computes where the weights lie."""

Sharing = Literal["none", "memory", "cuda"]
"""Which shared memory an engine opens: none, files in memory, or the trainer's on its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was probed once at start, never guessed."""

    version: str
    vocab_size: int
    context_length: int
    max_running_requests: int
    """Serving slots as they turned out; 0 where the engine does not say."""
    native_spans: bool
    """Per-token spans survive a swap in place: proved by a swap."""
    takes_salt: bool
    """A salt keeps cached prefixes apart."""
    forgets_prefixes: bool = False
    """No cached prefix is used under other weights than made it, whatever the salt says."""
    update_bracket: bool
    """/begin_weight_update and /end_weight_update must surround tensor updates."""
    hash: WeightHash = "sha256"
    """Of ``checksums``."""
    tensor: int = 1
    """Tensor-parallel ranks."""
    flat_broadcast: bool = False
    """Takes a whole bucket as one broadcast of its bytes."""
    own_buckets: bool = False
    """Takes all buckets of a publication in one call, in the form of ``own_format``."""
    own_broadcast: bool = False
    """Takes them so by broadcast too."""
    shares: Sharing = "none"
    """What ``update_from_shared`` can open."""
    takes_adapters: bool = False
    """``update_adapter`` works: an adapter is loaded over the base for all requests at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """One incarnation of one engine slot."""

    slot: int
    incarnation: str
    """New for each start; checked at every publication and routing change."""
    url: str
    pid: int
    extra: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, torch dtype name (``float32``) and shape of one weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class EngineClient(Protocol):
    """One engine over HTTP. All methods are coroutines; every one has its own deadline.

    Errors: TransportError, OverloadError, GenerationTimeout (retried by GROUP) where the answer
    says so; EngineRefused for a refused control call; ContractViolation for an answer outside the
    contract (a bare 503 or an unknown body among them).
    """

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        ...

    async def generate(self, request: GenerateRequest, *, deadline_s: float) -> list[Generation]:
        """Sample ``request.n`` responses; one entry each, in order. Never retried here."""
        ...

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all with None. Unknown ids are no error."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. ``abort``: running requests return partial; the others keep them."""
        ...

    async def resume(self) -> None:
        """Go on after ``pause``. No error when not paused."""
        ...

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. EngineRefused while requests run."""
        ...

    async def is_alive(self, *, timeout_s: float) -> bool:
        """A generation probe. False on any failure; a paused engine counts as alive."""
        ...

    async def info(self) -> EngineInfo:
        """Facts of this server."""
        ...

    async def load(self) -> EngineLoad:
        """Its load now."""
        ...

    async def policy(self) -> str:
        """The weight version the engine says it serves (a policy id, or its initial word)."""
        ...

    async def update_from_disk(self, path: str, policy: PolicyId, *, flush: bool) -> None:
        """Load a safetensors folder and serve it as ``policy``. PartialWrite if it is not whole."""
        ...

    async def update_adapter(self, path: str, policy: PolicyId, *, flush: bool) -> None:
        """Load an adapter in peft's format over the base and serve it as ``policy``."""
        ...

    async def update_from_shared(self, *buckets: SharedBucket, flush: bool) -> None:
        """Load from memory that this machine's processes share; copied on return.

        ``buckets``: one; as many as there are where the engine takes ``own_buckets``.
        """
        ...

    async def begin_update(self) -> None:
        """Open a weight-update session where the engine has one; otherwise nothing."""
        ...

    async def end_update(self) -> None:
        """Close it."""
        ...

    async def init_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join a collective group for broadcasts."""
        ...

    async def update_from_distributed(
        self,
        specs: Sequence[TensorSpec],
        *,
        group: str,
        policy: PolicyId | None,
        flush: bool,
        flat: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Receive one bucket by broadcast from rank 0 of ``group``; await beside the transfer.

        ``flat``: as one run of bytes instead of tensor by tensor. ``sizes``: several buckets of so
        many tensors each, flat, one after the other.
        """
        ...

    async def destroy_update_group(self, name: str) -> None:
        """Leave the group. No error when it does not exist."""
        ...

    async def set_policy(self, policy: PolicyId) -> None:
        """Set the weight version without touching weights."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Checksum of every weight it holds, by HF name (``runtime.publication.checksum``)."""
        ...

    async def release_memory(self) -> None:
        """Give the GPU memory back, under a pause by abort; the weights are gone."""
        ...

    async def resume_memory(self) -> None:
        """Take it again; only a publication makes the engine serve."""
        ...

    async def close(self) -> None:
        """Close idle connections."""
        ...


class EngineOwner(Protocol):
    """The process owner of one engine slot. Sync methods (it is wrapped in a Ray actor)."""

    def start(self) -> EngineAddress:
        """Start a new incarnation and wait until it answers. WaitTimeout, EngineDead."""
        ...

    def is_running(self) -> bool:
        """The server process (or thread) exists."""
        ...

    def stop(self) -> None:
        """End the server and everything it started. Idempotent."""
        ...
