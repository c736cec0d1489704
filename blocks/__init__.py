"""Typed handles to the outside: Ray cluster, image registry, object store, Beaker, tracking.

A block makes a client; it does not do the work. Secrets are ``SecretStr``; slugs never change.
"""
