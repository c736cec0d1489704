"""The owner of an engine slot, from the run file."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import SecretStr

from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.protocol import EngineOwner
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings
from runtime.session.context import Context


def make_owner(
    context: Context, model: str, slot: int, *, api_key: str, scratch: Path
) -> EngineOwner:
    """Not started; it travels into its Ray actor.

    Args:
        context: of the session.
        model: HF folder that the engine starts with.
        slot: number of the engine.
        api_key: of every call but health.
        scratch: local folder for what a server keeps while it lives.
    """
    if context.spec.rollout.engine == "sglang":
        return _sglang(context, model, slot, api_key, scratch)
    return _embedded(context, model, slot, api_key)


def _log_path(context: Context, slot: int) -> str:
    return str(context.attempt.path / f"engine-{slot}.log")


def _embedded(context: Context, model: str, slot: int, api_key: str) -> EmbeddedOwner:
    rollout = context.spec.rollout
    settings = EngineSettings.model_validate(
        {
            "model_path": model,
            "dtype": context.spec.model.dtype,
            "api_key": SecretStr(api_key),
            "max_running_requests": rollout.max_running_requests,
            "waiting_timeout_s": rollout.waiting_deadline,
            "running_timeout_s": rollout.running_deadline,
            "seed": context.spec.seed + slot,
            "torch_threads": context.threads,
            **rollout.engine_args,
        }
    )
    return EmbeddedOwner(
        slot=slot,
        settings=settings,
        log_path=_log_path(context, slot),
        start_deadline_s=rollout.engine_start_deadline,
    )


def _sglang(context: Context, model: str, slot: int, api_key: str, scratch: Path) -> SglangOwner:
    spec = context.spec
    rollout = spec.rollout
    settings = SglangSettings(
        model_path=model,
        python=str(rollout.engine_python or sys.executable),
        api_key=SecretStr(api_key),
        device="cuda" if spec.launch.gpus_per_replica else "cpu",
        dtype=spec.model.dtype,
        tensor=rollout.tensor,
        max_running_requests=rollout.max_running_requests,
        waiting_timeout_s=rollout.waiting_deadline,
        running_timeout_s=rollout.running_deadline,
        watchdog_timeout_s=rollout.engine_watchdog_timeout,
        seed=spec.seed + slot,
        threads=context.threads,
        args=dict(rollout.engine_args),
    )
    return SglangOwner(
        slot=slot,
        settings=settings,
        log_path=_log_path(context, slot),
        scratch=str(scratch),
        start_deadline_s=rollout.engine_start_deadline,
    )
