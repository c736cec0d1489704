"""What every test runs under: quiet libraries, one thread each, no network, patient hypothesis."""

from __future__ import annotations

import os
import sys

# Before anything heavy is imported, here or in a child: these are read at import.
os.environ.update(
    DO_NOT_TRACK="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

from hypothesis import HealthCheck, settings

# Code is compiled once, not by each of the hundreds of processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine makes an example slow, not wrong.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
