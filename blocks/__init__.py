"""Typed handles to the outside: Ray cluster, image registry, Beaker, object store, tracking.

A block makes a client; it does not do the work. Secrets are ``SecretStr``; slugs never change.
Prefect finds this room by the entry point group ``prefect.collections``: server and workers import
it, so nothing heavy is imported at the top of these files.
"""

from blocks.beaker_account import BeakerAccount
from blocks.image_registry import ImageRegistry
from blocks.object_store import ObjectStore
from blocks.ray_cluster import RayCluster
from blocks.tracking import Tracking

__all__ = ["BeakerAccount", "ImageRegistry", "ObjectStore", "RayCluster", "Tracking"]
