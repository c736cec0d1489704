"""Engines: HTTP servers that generate, and what the rest of the system needs to talk to one.

Here: the protocol, the client that speaks the wire contract, how answers become errors, the pool
and the health monitor, and one folder or file per implementation. Not here: who asks for what
(``rollout``) and how weights travel (``publication``). Start at ``protocol``;
``docs/engine-contract.md`` is the wire.
"""
