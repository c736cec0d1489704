"""The durable steps: each Prefect task ensures one committed step and returns its receipt.

Retry conditions live here because they are orchestration; numerics, files and processes belong to
``runtime``. Start at ``tasks.segment``.
"""
