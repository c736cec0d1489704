"""A folder that is not whole is answered, and never loaded.

Upstream finds out while it already writes into the model. To take that back it reads the same files
again, and ends. Our client looks before it sends; it may lie on another host, where a shared folder
is further along than here.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from runtime.engines.sglang.inside.plugin import wrap
from runtime.engines.weight_folder import check_folder
from runtime.errors import PartialWrite

_READ = (None, "auto", "safetensors")
"""Load formats that read safetensors where there are any."""


def hook_folders(manager: Any) -> None:
    """Refuse ``/update_weights_from_disk`` of a torn folder, as a bad path is refused.

    Args:
        manager: module ``sglang.srt.managers.tokenizer_manager``.
    """
    wrap(manager.TokenizerManager, "update_weights_from_disk", _whole_only)


def _whole_only(original: Any) -> Any:
    @functools.wraps(original)
    async def update(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if obj.load_format in _READ:
            try:
                await asyncio.to_thread(check_folder, obj.model_path)
            except PartialWrite as error:
                return False, f"Failed to get weights iterator: {error}.", 0
        return await original(self, obj, *args, **kwargs)

    return update
