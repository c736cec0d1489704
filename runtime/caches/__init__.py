"""Compiler caches that outlive their node: packed, published once per key, restored before a start.

Best effort from end to end: nothing in here ever fails a run. Start reading at ``publishing``.
"""
