"""A Beaker server made from the client package's own stubs: real gRPC over TLS, real REST.

It keeps of the real one: the wire, tokens on every call, one experiment per name (409), jobs
listed by task, answers in the package's own messages. It schedules nothing: tests say what came.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
from beaker import beaker_pb2 as pb2
from beaker import beaker_pb2_grpc as rpc

from tests.http_thread import answer_in_thread

TOKEN = "the-token-of-the-test"


@dataclass
class FakeBeaker:
    """State of the server; tests read and write it."""

    token: str = TOKEN
    experiments: dict[str, Any] = field(default_factory=dict)
    """Name -> Workload message."""
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> the JSON that was posted."""
    jobs: list[Any] = field(default_factory=list)
    canceled: list[str] = field(default_factory=list)
    num_posts: int = 0
    lose_answers: int = 0
    """So many posts are taken and answered by a closed connection."""
    fail_posts: int = 0
    """So many posts are answered by 500 and not taken."""
    released: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    """Somebody waits for ``released``."""
    """While it is not set, nothing is answered, nor done afterwards."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    agent: str = ""
    rpc: str = ""

    def config(self, folder: Path, token: str = TOKEN) -> dict[str, str]:
        """The client's own configuration file, in the variable that names it."""
        path = folder / f"beaker-{token}.yml"
        path.write_text(
            f"user_token: {token}\nagent_address: {self.agent}\nrpc_address: {self.rpc}\n"
            "default_org: ai2\ndefault_workspace: ai2/test\n"
        )
        return {"BEAKER_CONFIG": str(path)}


class Service(rpc.BeakerServicer):
    def __init__(self, state: FakeBeaker) -> None:
        self._state = state

    def _enter(self, context: Any) -> None:
        sent = dict(context.invocation_metadata()).get("authorization", "")
        if sent.lower() != f"bearer {TOKEN}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "bad token")
        if not self._state.released.is_set():
            self._state.held.set()
            self._state.released.wait()
            context.abort(grpc.StatusCode.ABORTED, "hung")

    def ResolveWorkspaceName(self, request: Any, context: Any) -> Any:
        self._enter(context)
        return pb2.ResolveWorkspaceNameResponse(workspace_id="w1")

    def GetWorkspace(self, request: Any, context: Any) -> Any:
        self._enter(context)
        return pb2.GetWorkspaceResponse(workspace=pb2.Workspace(id="w1"))

    def ResolveOrganizationName(self, request: Any, context: Any) -> Any:
        self._enter(context)
        return pb2.ResolveOrganizationNameResponse(organization_id="o1")

    def GetWorkload(self, request: Any, context: Any) -> Any:
        self._enter(context)
        for workload in self._state.experiments.values():
            if workload.experiment.id == request.workload_id:
                return pb2.GetWorkloadResponse(workload=workload)
        return context.abort(grpc.StatusCode.NOT_FOUND, "no such workload")

    def ListWorkloads(self, request: Any, context: Any) -> Any:
        self._enter(context)
        part = request.options.name_or_description_substring
        found = [w for name, w in self._state.experiments.items() if part in name]
        return pb2.ListWorkloadsResponse(workloads=found)

    def ListJobs(self, request: Any, context: Any) -> Any:
        self._enter(context)
        of_task = [job for job in self._state.jobs if job.task_id == request.options.task_id]
        return pb2.ListJobsResponse(jobs=of_task)

    def CancelWorkloads(self, request: Any, context: Any) -> Any:
        self._enter(context)
        self._state.canceled.extend(request.workload_ids)
        for workload in self._state.experiments.values():
            if workload.experiment.id in request.workload_ids:
                self._end(workload)
        return pb2.CancelWorkloadsResponse(workload_ids=request.workload_ids)

    def _end(self, workload: Any) -> None:
        tasks = {task.id for task in workload.experiment.tasks}
        for job in self._state.jobs:
            if job.task_id in tasks and not job.status.HasField("finalized"):
                job.status.status = pb2.STATUS_CANCELED
                job.status.canceled_code = pb2.CANCELATION_CODE_MANUAL
                job.status.canceled.GetCurrentTime()
                job.status.finalized.GetCurrentTime()


def _rest(state: FakeBeaker) -> type[BaseHTTPRequestHandler]:
    class Rest(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not state.released.is_set():
                state.held.set()
                state.released.wait()
                self.close_connection = True
                return
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._answer(401, {"message": "bad token"})
                return
            state.num_posts += 1
            if state.fail_posts:
                state.fail_posts -= 1
                self._answer(500, {"message": "try again"})
                return
            (name,) = parse_qs(urlsplit(self.path).query)["name"]
            with state.lock:
                workload = self._take(name, json.loads(body))
            if workload is None:
                self._answer(409, {"message": "already in use"})
                return
            if state.lose_answers:
                state.lose_answers -= 1
                self.close_connection = True
                self.connection.close()
                return
            self._answer(200, {"id": workload.experiment.id})

        def _take(self, name: str, spec: dict[str, Any]) -> Any:
            if name in state.experiments:
                return None
            number = len(state.experiments) + 1
            workload = pb2.Workload()
            workload.experiment.id = f"ex{number}"
            workload.experiment.name = name
            workload.experiment.description = spec.get("description", "")
            for index, task in enumerate(spec["tasks"]):
                workload.experiment.tasks.add(id=f"ex{number}-t{index}", name=task.get("name", ""))
            state.experiments[name], state.specs[name] = workload, spec
            return workload

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    return Rest


@contextmanager
def serving(folder: Path) -> Iterator[FakeBeaker]:
    """A server on loopback; ``folder`` keeps its certificate."""
    state = FakeBeaker()
    state.released.set()
    key, certificate = _certificate()
    roots = folder / "roots.pem"
    roots.write_bytes(certificate)
    os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(roots)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_BeakerServicer_to_server(Service(state), server)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    rest = ThreadingHTTPServer(("127.0.0.1", 0), _rest(state))
    answer_in_thread(rest)
    state.agent, state.rpc = f"http://127.0.0.1:{rest.server_port}", f"localhost:{port}"
    try:
        yield state
    finally:
        state.released.set()
        server.stop(0).wait()
        rest.shutdown()
        rest.server_close()


@cache
def _certificate() -> tuple[bytes, bytes]:
    """One for all servers of a process: gRPC reads its roots once."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
