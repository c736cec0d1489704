"""Which owner an engine slot gets, from the run file: for a session, and for an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import SecretStr

from configs.run import RunSpec
from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.keepalive import SERVER_KEEPALIVE_S
from runtime.engines.protocol import EngineOwner
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings


def engine_owner(
    spec: RunSpec,
    *,
    model: str,
    slot: int,
    api_key: str,
    log_path: Path,
    threads: int,
    host: str = "127.0.0.1",
    scratch: Path | None = None,
) -> EngineOwner:
    """The owner of one slot; nothing is started yet.

    Args:
        spec: the run file; ``rollout.engine`` says which engine.
        model: HF folder it starts with.
        slot: its number, from 0.
        api_key: of every call. The ports stay on loopback; it keeps other users of the machine out.
        log_path: the server's stderr is appended here.
        threads: of its arithmetic, on CPU.
        host: address it listens on.
        scratch: a short folder on its host's disk for what a server keeps while it lives; None, or
            one that is not there: the temporary folder.
    """
    if spec.rollout.engine == "sglang":
        return SglangOwner(
            slot=slot,
            settings=_sglang_settings(
                spec, model=model, slot=slot, api_key=api_key, threads=threads, host=host
            ),
            log_path=str(log_path),
            scratch=None if scratch is None else str(scratch),
            start_deadline_s=spec.rollout.engine_start_deadline,
        )
    rollout = spec.rollout
    settings = EngineSettings.model_validate(
        {
            "model_path": model,
            "host": host,
            "dtype": spec.model.dtype,
            "api_key": SecretStr(api_key),
            "max_running_requests": rollout.max_running_requests,
            "waiting_timeout_s": rollout.waiting_deadline,
            "running_timeout_s": rollout.running_deadline,
            "seed": spec.seed + slot,
            "torch_threads": threads,
            **rollout.engine_args,
        }
    )
    return EmbeddedOwner(
        slot=slot,
        settings=settings,
        log_path=str(log_path),
        start_deadline_s=rollout.engine_start_deadline,
    )


def _sglang_settings(
    spec: RunSpec, *, model: str, slot: int, api_key: str, threads: int, host: str
) -> SglangSettings:
    rollout = spec.rollout
    # Not an argument of the server's: it takes this one from its environment.
    args = {"keepalive_s": SERVER_KEEPALIVE_S, **rollout.engine_args}
    keepalive_s = args.pop("keepalive_s")
    return SglangSettings(
        model_path=model,
        python=str(rollout.engine_python or sys.executable),
        host=host,
        api_key=SecretStr(api_key),
        device="cuda" if spec.launch.gpus_per_replica else "cpu",
        dtype=spec.model.dtype,
        tensor=rollout.tensor,
        max_running_requests=rollout.max_running_requests,
        waiting_timeout_s=rollout.waiting_deadline,
        running_timeout_s=rollout.running_deadline,
        watchdog_timeout_s=rollout.engine_watchdog_timeout,
        seed=spec.seed + slot,
        threads=threads,
        sleeps=rollout.sleep,
        keepalive_s=float(keepalive_s),
        args=args,
    )
