"""The story of a run, readable aloud: only imports and ``@flow`` functions, and the command line.

No numerics and no loops over tokens. Start at ``flows.train``.
"""
