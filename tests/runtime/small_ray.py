"""A Ray of one node, in this process and gone with the block."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # This process has Ray more than once, and what exports Ray's metrics is ended by the first
    # shutdown alone (seen in 2.60; https://github.com/ray-project/ray/pull/58952 meant to end the
    # later ones). The thread of a later Ray goes on exporting and logging every ten seconds, also
    # while the process ends and the objects that it needs are gone: green tests, then a crash.
    "RAY_enable_open_telemetry": "0",
}


@contextmanager
def one_node() -> Iterator[None]:
    """Start it on loopback, without a dashboard; the environment is put back afterwards."""
    import ray

    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(SETTINGS)
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
        try:
            yield
        finally:
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)
