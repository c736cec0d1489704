"""What a run *is*: run-file schema, plan arithmetic, presets and cluster profiles.

Reads files and nothing else; imports pydantic and the standard library, so any process can parse a
run without torch, ray or prefect. What a run *does* belongs to ``runtime``. Start at
``configs.run`` (the sections), then ``configs.load`` and ``configs.plan``.
"""
