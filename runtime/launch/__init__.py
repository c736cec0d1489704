"""Bringing attempts to where they run: one backend a file, and the rules that all of them share.

Here belong claims and attach rules, the submission of guards, and reading a scheduler's status.
What a guard does once it runs does not (``runtime.session.guard``). Start at ``attempts`` for who
may launch, at ``local`` for the smallest backend.
"""
