"""The plugin that each process of the server loads: checksums, buckets, stamped prefixes.

A process where a hook does not fit ends: a server that only seems to have them must not serve.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Any


def register() -> None:
    """Put the hooks in; called once in every process, before it serves."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return  # the detokenizer holds neither weights nor prefixes
    try:
        from runtime.engines.sglang.inside.checksums import hook_checksums
        from runtime.engines.sglang.inside.loading import hook_loading
        from runtime.engines.sglang.inside.stamps import hook_stamps

        module = import_module
        hook_checksums(module("sglang.srt.utils.weight_checker"))
        hook_loading(module("sglang.srt.model_executor.model_runner_components.weight_updater"))
        hook_stamps(
            scheduler=module("sglang.srt.managers.scheduler"),
            updater=module("sglang.srt.managers.scheduler_components.weight_updater"),
        )
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def wrap(owner: Any, name: str, make: Any) -> None:
    """Replace method ``name`` of a class by ``make(original)``.

    Raises:
        AttributeError: if the class has none.
    """
    setattr(owner, name, make(getattr(owner, name)))
