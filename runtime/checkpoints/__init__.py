"""Trainer state, ledger and policy clock resumable as one: commits, and what is made of them.

Here: writing a commit beside training, finding the newest valid one, retention, HF export. Not
here: the chain itself (``runtime.rundir``), how a backend lays out its state (``runtime.trainer``).
Start at README.md.
"""
