"""How a run happens: plain Python, Ray and torch, one sub-room per concept, no Prefect anywhere.

Heavy imports live in the adapter that needs them. Start at ``runtime.session.driver`` for the life
of one
training step, at ``runtime.rundir`` for what is durable, at ``runtime.errors`` for what can go
wrong.
"""
