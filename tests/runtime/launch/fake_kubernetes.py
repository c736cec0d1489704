"""RayJobs by name under their path, as the Kubernetes API keeps them; 409 for a second one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.runtime.launch.fake_http import FakeScheduler, JsonHandler

TOKEN = "the-token-of-the-kubeconfig"
NAMESPACE = "team"
_PATH = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs"


class FakeKubernetes(FakeScheduler):
    """State of the server; tests read and write it."""

    token = TOKEN

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Any] = {}
        self.is_unknown = False
        """Neither the operator's kind nor the namespace: the API answers both with 404."""

    def config(self, path: Path, token: str = TOKEN) -> Path:
        """A kubeconfig with one context, ``c``."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path.write_text(json.dumps(document))
        return path


def _handler(state: FakeKubernetes) -> type[JsonHandler]:
    class Handler(JsonHandler):
        fake = state

        def do_POST(self) -> None:
            body = self.body()
            if not self._may_enter() or self.is_failing():
                return
            if state.is_unknown:
                self.answer(404, {})
                return
            asked = json.loads(body)
            name = asked["metadata"]["name"]
            with state.lock:
                is_new = name not in state.objects
                if is_new:
                    state.objects[name] = asked
            if not is_new:
                self.answer(409, {"reason": "AlreadyExists"})
            elif not self.is_lost():
                self.answer(201, asked)

        def do_GET(self) -> None:
            if self._may_enter():
                found = state.objects.get(self.path.rpartition("/")[2])
                self.answer(200 if found else 404, found or {"reason": "NotFound"})

        def do_DELETE(self) -> None:
            if self._may_enter():
                found = state.objects.pop(self.path.rpartition("/")[2], None)
                self.answer(200 if found else 404, {})

        def _may_enter(self) -> bool:
            assert self.path.startswith(_PATH)
            return self.may_enter()

    return Handler


@contextmanager
def serving() -> Iterator[FakeKubernetes]:
    """A server on loopback."""
    state = FakeKubernetes()
    with state.serving(_handler(state)):
        yield state
