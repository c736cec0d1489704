"""The trainer: from judged groups to new weights.

``advantages``, ``losses`` and ``packing`` are pure; ``torch/`` is one backend of ``protocol``;
``group`` runs one backend per rank and is the only file here that knows Ray. Sampling, rewards and
the way weights reach engines live elsewhere. Start at ``protocol``.
"""
