"""The real SGLang server for the contract suite: one process for many tests, as it was after start.

A start takes tens of seconds, so a server is kept while the limits stay the same, and put back
between tests: nothing runs, nothing paused, weights ``a`` called ``default``, an empty cache.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings
from tests.contracts.lane import LANE

KEY = "contract-suite-key"
PYTHON = Path(os.environ.get("MILEPOST_SGLANG_PYTHON", ".venv-sglang/bin/python")).absolute()
IS_REQUIRED = os.environ.get("MILEPOST_REQUIRE_SGLANG") == "1"

_ARGS: dict[str, Any] = {"max_total_tokens": 16384, "log_level_http": "warning", **LANE.args}


def need_environment() -> None:
    """Skip where SGLang's environment is missing; fail where ``make test-sglang`` asked for it."""
    if not PYTHON.exists():
        missing = f"no SGLang environment at {PYTHON}: make venv-sglang"
        if IS_REQUIRED:
            pytest.fail(missing)
        pytest.skip(missing)


def owner_of(model: Path, log: Path, **fields: Any) -> SglangOwner:
    """An owner with the lane's settings; fields named as ``SglangSettings`` or as its arguments."""
    own = {name: fields.pop(name) for name in list(fields) if name in SglangSettings.model_fields}
    args = {**_ARGS, **own.pop("args", {}), **fields}
    settings = SglangSettings.model_validate(
        {
            "model_path": str(model),
            "python": str(PYTHON),
            "api_key": KEY,
            "device": LANE.device,
            "dtype": str(LANE.dtype).removeprefix("torch."),
            "max_running_requests": 32,
            "seed": 1,
            "args": args,
            **own,
        }
    )
    return SglangOwner(slot=0, settings=settings, log_path=str(log), start_deadline_s=LANE.start_s)


class SharedServers:
    """The server with ordinary limits, and at most one with others; a dead one is started again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._ordinary: Lent | None = None
        self._special: Lent | None = None

    @contextmanager
    def lend(self, **limits: Any) -> Iterator[Lent]:
        """A server with these limits, put back."""
        running = self._special if limits else self._ordinary
        if running is None or running.limits != limits or not running.is_put_back(self._model):
            if running is not None:
                running.owner.stop()
            owner = owner_of(self._model, self._folder / "engine.log", **limits)
            running = Lent(owner, limits, owner.start().url)
            if limits:
                self._special = running
            else:
                self._ordinary = running
        yield running

    def close(self) -> None:
        """End the servers."""
        for running in (self._ordinary, self._special):
            if running is not None:
                running.owner.stop()
        self._ordinary = self._special = None


@dataclass
class Lent:
    """A server that tests share."""

    owner: SglangOwner
    limits: dict[str, Any]
    url: str
    version: str = field(init=False)

    def __post_init__(self) -> None:
        with self._open("/server_info", None) as answer:
            self.version = json.load(answer)["version"]

    def is_put_back(self, model: Path) -> bool:
        """Put it back; False where it is dead or does not answer."""
        try:
            self._put_back(model)
        except OSError:
            return False
        return self.owner.is_running()

    def _put_back(self, model: Path) -> None:
        self._post("/abort_request", {"abort_all": True})
        self._post("/continue_generation", {})
        self._post("/end_weight_update", {})
        self._post("/destroy_weights_update_group", {"group_name": "g"})
        body = {"model_path": str(model), "weight_version": "default", "flush_cache": True}
        while self._post("/update_weights_from_disk", body) != 200:
            # Requests of the test before are still on their way out.
            self._post("/abort_request", {"abort_all": True})
            time.sleep(0.05)

    def _post(self, path: str, body: dict[str, object]) -> int:
        try:
            with self._open(path, body) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def _open(self, path: str, body: dict[str, object] | None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=60)
