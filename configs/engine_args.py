"""Arguments of an engine server in the run file, and those a run file cannot set.

`rollout.engine_args` goes to the server as it stands. What Milepost decides itself, because a field
of its own says it or because a contract hangs on it, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from configs.section import Scalar as Scalar

_BY_FIELD: Mapping[str, str] = {
    "model-path": "model.path",
    "tokenizer-path": "model.tokenizer",
    "dtype": "model.dtype",
    "chat-template": "model.chat_template",
    "tp-size": "rollout.tensor",
    "max-running-requests": "rollout.max_running_requests",
    "watchdog-timeout": "rollout.engine_watchdog_timeout",
    "enable-memory-saver": "rollout.sleep",
    "random-seed": "seed",
    "device": "launch.gpus_per_replica",
}
"""Arguments of SGLang that a field of the run file decides."""

_OURS: Mapping[str, str] = {
    "host": "engines listen where the run decides",
    "port": "each engine takes a free port of its own",
    "nccl-port": "each engine takes a free port of its own",
    "dist-init-addr": "an engine lies on one host",
    "nnodes": "an engine lies on one host",
    "node-rank": "an engine lies on one host",
    "base-gpu-id": "devices are assigned by the run: an engine sees its own only",
    "gpu-id-step": "devices are assigned by the run: an engine sees its own only",
    "api-key": "a fresh key is made for every attempt",
    "admin-api-key": "a fresh key is made for every attempt",
    "weight-version": "publications name the weights",
    "skip-tokenizer-init": "stop texts need the tokenizer",
    "skip-server-warmup": "readiness is probed",
    "tokenizer-worker-num": "one HTTP process answers for an engine",
    "enable-http2": "clients speak HTTP/1.1",
    "grpc-mode": "clients speak HTTP/1.1",
    "use-ray": "the engine's owner is in Ray, the engine is not",
    "enable-dp-attention": "publications address one model replica an engine",
    "dp-size": "publications address one model replica an engine; use rollout.engines",
    "pp-size": "publications address one stage an engine",
    "ep-size": "publications address whole experts",
    "config": "arguments stand in the run file",
}
"""Arguments of SGLang that nobody sets, with the reason."""

_SPELLINGS: Mapping[str, str] = {
    "model": "model-path",
    "tensor-parallel-size": "tp-size",
    "tp": "tp-size",
    "data-parallel-size": "dp-size",
    "dp": "dp-size",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "expert-parallel-size": "ep-size",
    "ep": "ep-size",
    "nccl-init-addr": "dist-init-addr",
}

_EMBEDDED_OURS: Mapping[str, str] = {
    "model_path": "model.path",
    "host": "engines listen where the run decides",
    "port": "each engine takes a free port of its own",
    "api_key": "a fresh key is made for every attempt",
    "weight_version": "publications name the weights",
}


def flag_of(name: str) -> str:
    """The argument as SGLang's command line names it, in its main spelling, without dashes."""
    flag = name.lower().lstrip("-").replace("_", "-")
    return _SPELLINGS.get(flag, flag)


def has_flag(args: Mapping[str, Scalar], flag: str) -> bool:
    """One of the arguments is this one, in whatever spelling."""
    return any(flag_of(name) == flag for name in args)


def is_owned_flag(flag: str) -> bool:
    """Milepost sets this argument of SGLang, or nobody does. Abbreviations count: argparse does."""
    return _owned(flag) is not None


def owned_because(engine: str, name: str) -> str | None:
    """Why a run file cannot set this argument of the engine; None where it can."""
    if engine == "embedded":
        return _EMBEDDED_OURS.get(name)
    owned = _owned(flag_of(name))
    if owned is None:
        return None
    return _OURS.get(owned) or f"{_BY_FIELD[owned]} decides it"


def _owned(flag: str) -> str | None:
    names = (*_BY_FIELD, *_OURS)
    if flag in names:
        return flag
    # The server's parser takes an unambiguous beginning for the whole name.
    return next((name for name in names if len(flag) > 2 and name.startswith(flag)), None)
