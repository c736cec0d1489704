"""Before SGLang's own HTTP application: the key, and facts that its endpoints do not tell."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

CONTRACT = 1
"""Of ``GET /milepost``."""

_OPEN = ("/health", "/health_generate", "/freeze_gc")
"""Probes, and what the server asks of itself once it is up: it does not know the key."""


def add_front(http: Any, api_key: str | None, serving: Callable[[], Any]) -> None:
    """Add ``GET /milepost`` and, with a key, the check of it.

    The key is not given to the server itself, which prints its arguments and answers them.

    Args:
        http: module ``sglang.srt.entrypoints.http_server``.
        api_key: bearer token of every call but /health*; None: none.
        serving: gives the uvicorn server that answers, whose settings are the ones in force.
    """
    app = http.app

    async def milepost() -> dict[str, object]:
        manager = http._global_state.tokenizer_manager
        model, on_gpu = manager.model_config, manager.server_args.device == "cuda"
        # A draft model takes its own copy of what arrives, and ours arrives once.
        drafts = getattr(manager.server_args, "speculative_algorithm", None) is not None
        return {
            "contract": CONTRACT,
            "vocab_size": int(model.vocab_size),
            "context_length": int(model.context_len),
            "hash": "mix64" if on_gpu else "sha256",
            "shares": "cuda" if on_gpu else "none",
            "flat_broadcast": True,
            "own_buckets": not drafts,
            # Over NCCL not until that was seen on GPUs; there buckets come one by one, flat.
            "own_broadcast": not drafts and not on_gpu,
            "keepalive_s": serving().config.timeout_keep_alive,
        }

    app.get("/milepost")(milepost)
    if api_key is not None:
        app.add_middleware(KeyCheck, api_key=api_key)


class KeyCheck:
    """ASGI middleware: 401 without the right key."""

    def __init__(self, app: Any, api_key: str) -> None:
        self._app = app
        self._right = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a call through, or answer it."""
        if scope["type"] != "http" or scope["path"] in _OPEN or self._may(scope["headers"]):
            await self._app(scope, receive, send)
            return
        body = b'{"error":"Unauthorized"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _may(self, headers: Any) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._right)
