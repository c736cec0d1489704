"""Loaded at every start of the CPU environment's interpreter: torchvision without its compiled ops.

The wheel's operators are built for another torch than the CPU one. Its Python only needs two of
their names to exist; SGLang's text models call neither.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; it is asked before torchvision is imported, and defines what it needs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "torchvision" and "torch" in sys.modules:
            sys.meta_path.remove(self)
            import torch

            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", _SCHEMA)


sys.meta_path.insert(0, _BeforeTorchvision())
