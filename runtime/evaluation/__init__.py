"""Evaluation: what is asked (``sets``), answered (``items``), and what that is worth (``metrics``).

``receipts`` holds what became of each evaluation, one writer per file. How one is run on engines
lies in the runners; who decides when, in ``runtime.session``.
"""
