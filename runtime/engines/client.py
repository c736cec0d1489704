"""One engine over HTTP: the only client of the engines' wire contract."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import anyio.to_thread
import orjson

from runtime.engines.answers import classify
from runtime.engines.bucket_body import cuda_body, memory_body, own_body
from runtime.engines.connection import Connection
from runtime.engines.own_format import broadcast_format
from runtime.engines.probe import probe
from runtime.engines.protocol import (
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    Generation,
    PauseMode,
    TensorSpec,
)
from runtime.engines.shared import SharedBucket
from runtime.engines.weight_folder import check_folder
from runtime.engines.wire import aborted_early, generate_body, generations
from runtime.errors import (
    ContractViolation,
    EngineRefused,
    GenerationTimeout,
    RunError,
)
from runtime.policy import PolicyId
from runtime.safetensors_header import HeaderRefused, tensors_of_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Seconds each kind of call may take; all but generation's stretch on slow machines."""

    connect_s: float = 5.0
    """To open a connection, for every call."""
    control_s: float = 30.0
    """Pauses, flushes, aborts, versions, loads and facts."""
    update_s: float = 600.0
    """One weight update, or one bucket of it."""
    checksum_s: float = 120.0
    """Checksums of all weights."""


class HttpEngineClient:
    """Speaks to one engine. No call is repeated here: a lost generation may have run.

    Args:
        url: base address.
        api_key: bearer token, where the engine wants one.
        vocab_size: for engines that do not tell (SGLang); requests with ids outside never leave.
        max_connections: connections at once; a call over it waits within its own deadline.
        limits: deadlines.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        vocab_size: int | None = None,
        max_connections: int = 1024,
        limits: ClientLimits | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._limits = limits or ClientLimits()
        self._http = Connection(
            self._url,
            api_key=api_key,
            max_connections=max_connections,
            connect_s=self._limits.connect_s,
        )
        self._info: EngineInfo | None = None
        self._paused: PauseMode | None = None

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return self._url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Generation

    async def generate(self, request: GenerateRequest, *, deadline_s: float) -> list[Generation]:
        """Sample ``request.n`` responses; one entry each, in order.

        Raises:
            GenerationTimeout: if no whole answer came within ``deadline_s``; the engine is told to
                abort it by the closed connection.
            TransportError, OverloadError, UnavailableError: see ``answers.classify``.
            ContractViolation: for anything else, ids outside the vocabulary among them.
        """
        self._check_ids(request.input_ids)
        body = orjson.dumps(generate_body(request))
        try:
            async with asyncio.timeout(deadline_s):
                status, answer = await self._http.send("POST", "/generate", body)
        except TimeoutError as error:
            raise GenerationTimeout(
                f"no answer to {request.rid} within {deadline_s:g} s",
                rid=request.rid,
                url=self._url,
            ) from error
        if (early := aborted_early(status, answer, request)) is not None:
            return early
        failure = classify(status, answer)
        if failure is not None:
            raise failure
        return generations(answer, n=request.n, router=request.router)

    async def abort(self, rid: str | None) -> None:
        """Abort one call, or everything with None. Unknown ids are no error."""
        await self._control("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def _check_ids(self, ids: Sequence[int]) -> None:
        """SGLang's whole server ends on an id outside the vocabulary."""
        vocab_size = self._vocab_size or (self._info.vocab_size if self._info else 0)
        if vocab_size and ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            outside = next(t for t in ids if not 0 <= t < vocab_size)
            raise ContractViolation(
                f"token id {outside} is outside the vocabulary [0, {vocab_size})", token=outside
            )

    # Pauses

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; returns when it has stopped."""
        await self._control("/pause_generation", {"mode": mode})
        self._paused = mode

    async def resume(self) -> None:
        """Go on after ``pause``. No error when not paused."""
        await self._control("/continue_generation", {})
        self._paused = None

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. EngineRefused while requests run."""
        await self._control("/flush_cache", {})

    async def is_alive(self, *, timeout_s: float) -> bool:
        """Ask for one token; False on any failure. An engine we paused need only answer."""
        try:
            async with asyncio.timeout(timeout_s):
                status, _ = await self._http.send("GET", "/health_generate", None)
        except (TimeoutError, RunError):
            return False
        return status == 200 or (status == 503 and self._paused is not None)

    # Facts

    async def info(self) -> EngineInfo:
        """Facts of this server; probed at the first call with a few short requests of our own.

        Before the engine has traffic: one probe pauses it for a moment.
        """
        if self._info is None:
            self._info = await probe(
                self._http, vocab_size=self._vocab_size, limit_s=self._limits.control_s
            )
        return self._info

    async def load(self) -> EngineLoad:
        """Its load now."""
        answer = await self._get("/v1/loads")
        loads = cast(list[Mapping[str, Any]], answer["loads"])
        generated = [load.get("num_generated_tokens") for load in loads]
        return EngineLoad(
            running=sum(int(x["num_running_reqs"]) for x in loads),
            waiting=sum(int(x["num_waiting_reqs"]) for x in loads),
            token_usage=max(float(x["token_usage"]) for x in loads),
            generated_tokens=(
                sum(g for g in generated if g is not None) if None not in generated else None
            ),
        )

    async def policy(self) -> str:
        """The weight version the engine says it serves."""
        return str((await self._get("/model_info"))["weight_version"])

    # Weights

    async def update_from_disk(self, path: str, policy: PolicyId, *, flush: bool) -> None:
        """Load a safetensors folder and serve it as ``policy``.

        Raises:
            PartialWrite: if the folder is not whole as seen from here; nothing was sent.
            EngineRefused: if the engine could not load it, or ``flush`` meets retracted requests.
        """
        self._check_flush(flush)
        await anyio.to_thread.run_sync(check_folder, path)
        body = {"model_path": path, "weight_version": str(policy), "flush_cache": flush}
        await self._update("/update_weights_from_disk", body)

    async def update_adapter(self, path: str, policy: PolicyId, *, flush: bool) -> None:
        """Load an adapter in peft's format over the base and serve it as ``policy``.

        Raises:
            EngineRefused: if the engine takes none, could not load it, or ``flush`` meets retracted
                requests.
        """
        self._check_flush(flush)
        if not (await self.info()).takes_adapters:
            raise EngineRefused("this engine takes no adapters for all requests", url=self._url)
        body = {
            "lora_name": str(policy),
            "lora_path": path,
            "weight_version": str(policy),
            "flush_cache": flush,
        }
        await self._update("/load_lora_adapter", body)

    async def update_from_tensors(
        self, safetensors: bytes, *, policy: PolicyId | None, flush: bool
    ) -> None:
        """Send weights in the body, as safetensors bytes. Only the embedded engine reads that.

        Raises:
            ContractViolation: if the bytes are no safetensors; SGLang's server ends on a bad body.
            EngineRefused: if the weights do not fit, or ``flush`` meets retracted requests.
        """
        self._check_flush(flush)
        _check_safetensors(safetensors)
        body: dict[str, object] = {
            "serialized_named_tensors": [base64.b64encode(safetensors).decode()],
            "load_format": "safetensors",
            "flush_cache": flush,
        }
        if policy is not None:
            body["weight_version"] = str(policy)
        await self._update("/update_weights_from_tensor", body)

    async def update_from_shared(self, *buckets: SharedBucket, flush: bool) -> None:
        """Load from memory that this machine's processes share.

        Args:
            buckets: one; as many as there are where the engine takes ``own_buckets``.
            flush: forget cached prefixes then.

        Raises:
            ContractViolation: if a bucket's description does not come out; nothing was sent.
            EngineRefused: if the engine opens no such memory, or one bucket a call, the weights do
                not fit, or ``flush`` meets retracted requests.
        """
        self._check_flush(flush)
        info = await self.info()
        for bucket in buckets:
            if info.shares != ("memory" if bucket.cuda is None else "cuda"):
                raise EngineRefused(
                    f"this engine opens {info.shares} memory; the bucket lies in "
                    + ("host memory" if bucket.cuda is None else "device memory"),
                    url=self._url,
                )
        if info.own_buckets and info.shares == "cuda":
            body = own_body(buckets, num_ranks=info.tensor)
        elif len(buckets) == 1:
            (bucket,) = buckets
            body = (
                memory_body(bucket)
                if bucket.cuda is None
                else cuda_body(bucket, num_ranks=info.tensor)
            )
        else:
            raise EngineRefused(
                f"this engine takes one bucket a call, not {len(buckets)}", url=self._url
            )
        await self._update("/update_weights_from_tensor", {**body, "flush_cache": flush})

    async def begin_update(self) -> None:
        """Open a weight-update session where the engine has one."""
        if (await self.info()).update_bracket:
            await self._control("/begin_weight_update", {})

    async def end_update(self) -> None:
        """Close it."""
        if (await self.info()).update_bracket:
            await self._control("/end_weight_update", {})

    async def init_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join a collective group for broadcasts; returns when all ranks have joined."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body)

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

        Args:
            specs: of what arrives, in order.
            group: that the engine joined.
            policy: served then; None: as before.
            flush: forget cached prefixes then.
            flat: as one run of bytes.
            sizes: several buckets of so many tensors each, flat; only where the engine takes
                ``own_broadcast``.
        """
        self._check_flush(flush)
        body: dict[str, object] = {
            "names": [s.name for s in specs],
            "dtypes": [s.dtype for s in specs],
            "shapes": [s.shape for s in specs],
            "group_name": group,
            "flush_cache": flush,
        }
        if sizes is not None:
            body["load_format"] = broadcast_format(sizes)
        elif flat:
            body["load_format"] = "flattened_bucket"
        if policy is not None:
            body["weight_version"] = str(policy)
        await self._update("/update_weights_from_distributed", body)

    async def destroy_update_group(self, name: str) -> None:
        """Leave the group. No error when it does not exist."""
        body = {"group_name": name}
        status, answer = await self._http.call(
            "POST", "/destroy_weights_update_group", body, self._limits.control_s, "publication"
        )
        failure = classify(status, answer, call="control")
        if failure is not None and "does not exist" not in str(failure):
            raise failure

    async def set_policy(self, policy: PolicyId) -> None:
        """Set the weight version without touching weights or requests."""
        body = {"new_version": str(policy), "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    async def checksums(self) -> dict[str, str]:
        """Checksum of every weight the engine holds, by HF name."""
        answer = await self._control(
            "/weights_checker", {"action": "checksum"}, limit_s=self._limits.checksum_s
        )
        sums: dict[str, str] = {}
        for rank in cast(list[Mapping[str, Any]], answer.get("ranks") or []):
            for name, found in cast(Mapping[str, str], rank["checksums"]).items():
                if sums.setdefault(name, found) != found:
                    raise ContractViolation(
                        f"ranks of the engine hold different {name}", url=self._url, tensor=name
                    )
        if not sums:
            raise ContractViolation("the engine told no checksums", url=self._url)
        return sums

    # Memory

    async def release_memory(self) -> None:
        """Give the GPU memory of weights and KV back; the engine must have been paused by abort.

        The weights are gone: only a publication makes it serve again. Needs an engine that was
        started to sleep.
        """
        if self._paused != "abort":
            # Upstream asserts that nothing runs or waits, and its whole server ends.
            raise EngineRefused(
                "memory is released under a pause by abort only: nothing may run", url=self._url
            )
        await self._control("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        """Take the memory again; weights and prefixes in it mean nothing yet."""
        await self._control("/resume_memory_occupation", {})

    def _check_flush(self, flush: bool) -> None:
        """SGLang's server ends when an update flushes the cache under retracted requests."""
        if flush and self._paused == "retract":
            raise EngineRefused(
                "flush after a retracting pause would end an SGLang server: pause in place without "
                "flush, retract with a salt, or abort with flush",
                url=self._url,
            )

    # Calls

    async def close(self) -> None:
        """Close idle connections."""
        await self._http.close()

    async def _get(self, path: str) -> Mapping[str, Any]:
        status, answer = await self._http.call(
            "GET", path, None, self._limits.control_s, "readiness"
        )
        return self._fields(path, status, answer)

    async def _control(
        self, path: str, body: Mapping[str, object], *, limit_s: float | None = None
    ) -> Mapping[str, Any]:
        limit_s = self._limits.control_s if limit_s is None else limit_s
        status, answer = await self._http.call("POST", path, body, limit_s, "refresh")
        return self._fields(path, status, answer, needs_fields=path not in _EMPTY)

    async def _update(self, path: str, body: Mapping[str, object]) -> None:
        status, answer = await self._http.call(
            "POST", path, body, self._limits.update_s, "publication"
        )
        self._fields(path, status, answer)

    def _fields(
        self, path: str, status: int, answer: object, *, needs_fields: bool = True
    ) -> Mapping[str, Any]:
        failure = classify(status, answer, call="control")
        if failure is not None:
            raise type(failure)(f"{path}: {failure.message}", **failure.detail, url=self._url)
        if isinstance(answer, dict):
            return cast(Mapping[str, Any], answer)
        if needs_fields:
            raise ContractViolation(f"{path} did not answer with an object", url=self._url)
        return {}


_EMPTY = (
    "/abort_request",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
"""Calls that answer no JSON object."""


def _check_safetensors(data: bytes) -> None:
    try:
        tensors_of_bytes(data)
    except HeaderRefused as error:
        raise ContractViolation(f"these bytes are no whole safetensors file: {error}") from error
