"""The trainer: from judged groups to new weights.

``advantages``, ``losses`` and ``packing`` are pure; ``torch/`` is one backend of ``protocol``;
``group`` runs one backend per rank; it and ``actor`` alone know Ray. Sampling, rewards and
the way weights reach engines live elsewhere. Start at ``protocol``.
"""
