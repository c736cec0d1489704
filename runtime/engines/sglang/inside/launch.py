"""``python -m runtime.engines.sglang.inside.launch FD``: a SGLang server that ends with its owner.

Reads one line of JSON from stdin, takes a port, tells it on descriptor FD, and serves until stdin
ends: that pipe is held by the owner, so the server cannot outlive it. The pipe is watched before
anything heavy is imported.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any


def main() -> None:
    """Run one server."""
    # Without a group of its own, ending the group would end whoever started it by hand.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    order = json.loads(_line())
    threading.Thread(target=_end_with_owner, name="owner", daemon=True).start()
    listener = _take_port(order["host"])
    port = listener.getsockname()[1]
    with os.fdopen(int(sys.argv[1]), "wb") as tells:
        tells.write(json.dumps({"port": port}).encode() + b"\n")
    _load_model_code(order["model_path"], trust=order["trust_remote_code"])
    serving = _serve_on(listener)

    server_args: Any = import_module("sglang.srt.server_args")
    launcher: Any = import_module("sglang.launch_server")
    http: Any = import_module("sglang.srt.entrypoints.http_server")
    plugins: Any = import_module("sglang.srt.plugins")
    from runtime.engines.held_port import HeldPort
    from runtime.engines.sglang.inside.folders import hook_folders
    from runtime.engines.sglang.inside.front import add_front
    from runtime.engines.sglang.inside.pauses import hook_pauses

    plugins.load_plugins()
    manager = import_module("sglang.srt.managers.tokenizer_manager")
    hook_pauses(manager)
    hook_folders(manager)
    add_front(http, order["api_key"], serving)
    with HeldPort() as store:  # a child listens on it, much later
        args = [*order["args"], "--host", order["host"], "--port", str(port)]
        args += ["--nccl-port", str(store.port)]
        launcher.run_server(server_args.prepare_server_args(args))


def _line() -> bytes:
    """The first line of stdin, read without buffering: what follows is the owner's end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the owner left before it said what to serve")
        line += byte
    return line


def _end_with_owner() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _take_port(host: str) -> socket.socket:
    """A port that is ours from now on: bound, and listened on once the server is ready."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    return listener


def _load_model_code(model_path: str, *, trust: bool) -> None:
    """Config and tokenizer once, before there are children who would all do it at the same time.

    Models with code of their own write it into a module cache when they are first loaded.
    """
    transformers: Any = import_module("transformers")
    transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
    transformers.AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust)


def _serve_on(listener: socket.socket) -> Callable[[], Any]:
    """Have the HTTP server take our socket instead of binding the port again.

    Returns:
        What gives that server, once it serves.
    """
    uvicorn: Any = import_module("uvicorn")
    serve: Any = uvicorn.Server.serve
    servers: list[Any] = []

    async def on_listener(self: Any, sockets: Any = None) -> None:
        servers.append(self)
        await serve(self, sockets=sockets or [listener])

    uvicorn.Server.serve = on_listener
    return lambda: servers[-1]


if __name__ == "__main__":
    main()
