"""What every benchmark of files and publications says about its machine, and where it says it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def quiet_load(*, any_load: bool) -> float:
    """The load before the run; ends the program above 0.5 unless any load will do."""
    load = os.getloadavg()[0]
    if load > 0.5 and not any_load:
        raise SystemExit(f"load {load:.2f} is above 0.5: figures would mean nothing (--any-load)")
    return load


def report(found: Mapping[str, Any], *, load: float, out: Path | None) -> None:
    """Print one JSON object with the machine in it, and write it to ``out`` where that is given."""
    whole = {
        **found,
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    text = json.dumps(whole, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    print(text)
