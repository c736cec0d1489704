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
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings

KEY = "contract-suite-key"
PYTHON = Path(os.environ.get("MILEPOST_SGLANG_PYTHON", ".venv-sglang/bin/python")).absolute()
IS_REQUIRED = os.environ.get("MILEPOST_REQUIRE_SGLANG") == "1"

_ARGS: dict[str, Any] = {"max_total_tokens": 16384, "log_level_http": "warning"}


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
            "device": "cpu",
            "dtype": "float32",
            "max_running_requests": 32,
            "seed": 1,
            "args": args,
            **own,
        }
    )
    return SglangOwner(slot=0, settings=settings, log_path=str(log), start_deadline_s=300.0)


class SharedServers:
    """At most one server at a time, started again when other limits are asked for or it is dead."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._owner: SglangOwner | None = None
        self._limits: dict[str, Any] = {}
        self._url = ""
        self.num_started = 0

    @contextmanager
    def lend(self, **limits: Any) -> Iterator[str]:
        """The URL of a server with these limits, put back."""
        if self._owner is None or limits != self._limits or not self._owner.is_running():
            self.close()
            self._owner = owner_of(self._model, self._folder / "engine.log", **limits)
            self._limits, self._url = limits, self._owner.start().url
            self.num_started += 1
        else:
            self._put_back()
        yield self._url

    def close(self) -> None:
        """End the server."""
        if self._owner is not None:
            self._owner.stop()
        self._owner = None

    def _put_back(self) -> None:
        self._post("/abort_request", {"abort_all": True})
        self._post("/continue_generation", {})
        self._post("/end_weight_update", {})
        self._post("/destroy_weights_update_group", {"group_name": "g"})
        body = {"model_path": str(self._model), "weight_version": "default", "flush_cache": True}
        while self._post("/update_weights_from_disk", body) != 200:
            # Requests of the test before are still on their way out.
            self._post("/abort_request", {"abort_all": True})
            time.sleep(0.05)

    def _post(self, path: str, body: dict[str, object]) -> int:
        request = urllib.request.Request(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
