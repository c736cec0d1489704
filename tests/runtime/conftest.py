"""What tests of several rooms start: a Ray of this process's own."""

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_head() -> Iterator[None]:
    """One node on loopback, without a dashboard; the environment is put back afterwards."""
    import ray

    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0"
    )
    # Sockets have short names only, so not below pytest's own folder.
    with tempfile.TemporaryDirectory(prefix="mp-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=128 * 1024**2,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        yield
        ray.shutdown()
    os.environ.clear()
    os.environ.update(before)
