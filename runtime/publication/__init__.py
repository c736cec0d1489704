"""How a policy moves from the trainer to engines: one transaction, and the transports under it.

``transaction`` pauses, verifies, decides, ends what is not verified, and resumes; it is the same
for all transports and imports no torch. ``disk`` and ``broadcast`` only move bytes; ``snapshot``
and ``sender`` are their halves inside the trainer's process. Start at README.md. Routing of
requests does not belong here.
"""
