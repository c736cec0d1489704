"""Typed handles to the outside: Ray cluster, object store, tracking.

A block makes a client; it does not do the work. Secrets are ``SecretStr``; slugs never change.
Prefect finds this room by the entry point group ``prefect.collections``: server and workers import
it, so nothing heavy is imported at the top of these files.
"""

from blocks.object_store import ObjectStore
from blocks.ray_cluster import RayCluster
from blocks.tracking import Tracking

__all__ = ["ObjectStore", "RayCluster", "Tracking"]
