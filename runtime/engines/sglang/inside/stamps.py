"""Cached prefixes belong to the weights that computed them, whatever a request is salted with.

A scheduler counts its weight loads. The count is part of a request's cache key from the moment it
comes in, and a request that still waits when weights are loaded, or was retracted for it, gets the
new count: it will be read from the start by the new weights. One that runs keeps its key, so that
its mixed keys and values are never found under the new one. All ranks see requests and loads in one
order, so they count alike.
"""

from __future__ import annotations

import functools
from typing import Any

from runtime.engines.sglang.inside.plugin import wrap

UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_MARK = "#w"


def hook_stamps(*, scheduler: Any, updater: Any) -> None:
    """Stamp what comes in, and stamp again what waits while weights are loaded."""
    wrap(scheduler.Scheduler, "handle_generate_request", _stamp_incoming)
    for name in UPDATES:
        wrap(updater.SchedulerWeightUpdaterManager, name, _stamp_waiting)


def stamped(key: str | None, count: int) -> str:
    """The cache key of a request under weights loaded for the ``count``-th time."""
    return f"{(key or '').partition(_MARK)[0]}{_MARK}{count}"


def _stamp_incoming(original: Any) -> Any:
    @functools.wraps(original)
    def handle(self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        recv_req.extra_key = stamped(recv_req.extra_key, getattr(self, "milepost_loads", 0))
        return original(self, recv_req, *args, **kwargs)

    return handle


def _stamp_waiting(original: Any) -> Any:
    @functools.wraps(original)
    def update(self: Any, recv_req: Any) -> Any:
        scheduler = self.scheduler
        count = scheduler.milepost_loads = getattr(scheduler, "milepost_loads", 0) + 1
        for request in scheduler.waiting_queue:
            request.extra_key = stamped(request.extra_key, count)
        return original(self, recv_req)

    return update
