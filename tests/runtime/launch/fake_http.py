"""What the schedulers of tests have in common: on request they lose answers, fail, or hang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.http_thread import answer_in_thread


class FakeScheduler:
    """The knobs; state is the subclass's."""

    token: str

    def __init__(self) -> None:
        self.num_posts = 0
        self.lose_answers = 0
        """So many posts are taken and answered by a closed connection."""
        self.fail_posts = 0
        """So many posts are answered by 503 and not taken."""
        self.released = threading.Event()
        """While it is not set, nothing is answered, nor done afterwards."""
        self.held = threading.Event()
        """Somebody waits for ``released``."""
        self.released.set()
        self.lock = threading.Lock()
        self.url = ""

    @contextmanager
    def serving(self, handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
        """Answer on loopback."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        answer_in_thread(server)
        try:
            yield
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and answers JSON, and keeps quiet."""

    fake: FakeScheduler

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def may_enter(self) -> bool:
        """The token decides; what comes while the server hangs is never done."""
        if not self.fake.released.is_set():
            self.fake.held.set()
            self.fake.released.wait()
            self.close_connection = True
            return False
        if self.headers.get("Authorization") == f"Bearer {self.fake.token}":
            return True
        self.answer(401, {"reason": "Unauthorized"})
        return False

    def is_failing(self) -> bool:
        """One post that is not taken."""
        with self.fake.lock:
            self.fake.num_posts += 1
            fails = self.fake.fail_posts > 0
            self.fake.fail_posts -= fails
        if fails:
            self.answer(503, {})
        return fails

    def is_lost(self) -> bool:
        """One answer that nobody gets."""
        with self.fake.lock:
            lost = self.fake.lose_answers > 0
            self.fake.lose_answers -= lost
        if lost:
            self.close_connection = True
            self.connection.close()
        return lost

    def answer(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args
