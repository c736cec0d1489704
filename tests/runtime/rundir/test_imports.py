"""What every command loads stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOM = sorted(p.stem for p in Path("runtime/rundir").glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize(
    "modules",
    [
        [f"runtime.rundir.{name}" for name in ROOM],
        ["runtime.session.guard", "runtime.session.ensure", "runtime.launch.local"],
    ],
    ids=["rundir", "guard"],
)
def test_no_heavy_import(modules: list[str]) -> None:
    heavy = ("ray", "torch", "transformers", "prefect", "numpy", "aiohttp", "sglang")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.strip() == "[]"
