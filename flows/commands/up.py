"""`milepost up`: a local Prefect server with everything of Milepost's on it, and a worker."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands._run_file import AsJson

if TYPE_CHECKING:
    from flows.commands._server import Child

Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the server.")]
NoWorker = Annotated[bool, typer.Option("--no-worker", help="Start no worker.")]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(up)


def up(port: Port = 4200, no_worker: NoWorker = False, as_json: AsJson = False) -> None:
    """Start or find a Prefect server on loopback, deploy to it, and run a worker until Ctrl-C.

    Doing it again changes nothing. Ends only what it started; a training run that goes on keeps
    going. 0: ended by Ctrl-C, or nothing was left to keep running; 1: something failed.
    """
    from flows.commands._server import ServerError, environment

    # Prefect reads its settings when it is imported.
    os.environ.update(environment(port))
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ending.set())
    say: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    try:
        with ExitStack() as stack:
            _run(port, ending, say, stack, no_worker=no_worker, as_json=as_json)
    except ServerError as error:
        typer.echo(json.dumps({"error": str(error)}) if as_json else str(error), err=not as_json)
        raise typer.Exit(1) from error


def _run(
    port: int,
    ending: threading.Event,
    say: Callable[[str], None],
    stack: ExitStack,
    *,
    no_worker: bool,
    as_json: bool,
) -> None:
    import anyio

    from flows.commands._server import api_url, is_healthy, start_server, start_worker

    children: list[Child] = []

    def started(child: Child) -> Child:
        children.append(child)
        stack.callback(child.end)
        return child

    done: dict[str, Any] = {"api": api_url(port), "server": "found"}
    if not is_healthy(port):
        say(f"starting a Prefect server on {api_url(port)}")
        server = started(start_server(port, is_asked_to_end=ending.wait))
        done |= {"server": "started", "server_pid": server.pid}
    done |= anyio.run(_fill, port)
    if not no_worker:
        done["worker_pid"] = started(start_worker(port, done["work_pool"]["name"])).pid
    if as_json:
        typer.echo(json.dumps(done))
    for line in _lines(done, port):
        say(line)
    _until_asked(ending, children)


async def _fill(port: int) -> dict[str, Any]:
    """Put everything of Milepost's on the server."""
    import anyio.to_thread
    from prefect.client.orchestration import get_client

    from flows.commands import _deploying
    from flows.commands._server import environment

    folder = _deploying.checkout()
    async with get_client() as client:
        pool = await _deploying.ensure_pool(client)
        slugs = await _deploying.register_blocks(client)
        await anyio.to_thread.run_sync(_deploying.deploy, folder, environment(port))
        return {
            "work_pool": {"name": _deploying.POOL, "was": pool},
            "blocks": slugs,
            "deployments": await _deploying.deployment_ids(client, folder),
            "automations": await _deploying.ensure_automations(client, folder),
        }


def _lines(done: dict[str, Any], port: int) -> list[str]:
    pool, url = done["work_pool"], f"http://127.0.0.1:{port}"
    first = next(iter(done["deployments"]), "train/laptop")
    return [
        f"server {done['server']}: {url}",
        f"work pool {pool['name']}: {pool['was']}",
        f"blocks: {', '.join(done['blocks'])}",
        f"deployments: {', '.join(done['deployments'])}",
        *(f"automation {each['was']}: {name}" for name, each in done["automations"].items()),
        f"a run:  PREFECT_API_URL={done['api']} prefect deployment run {first}",
        "Ctrl-C ends what was started here; training that goes on keeps going",
    ]


def _until_asked(ending: threading.Event, children: list[Child]) -> None:
    """Wait for Ctrl-C, or for one of ours to end by itself; returns at once if nothing is ours."""
    from flows.commands._server import ServerError

    while children and not ending.wait(0.5):
        for child in children:
            if child.exit_status is not None:
                raise ServerError(
                    f"the {child.name} ended by itself with {child.exit_status}: see {child.log}"
                )
