"""The run directory: what is durable about a run, and who may write it. No Ray, no torch.

Here belong the layout of the output root, the chain (history and fence in one), the lease, the
control files, the registry of processes, the receipts, the workflow view and the journal. What a
checkpoint holds does not belong here (``runtime.checkpoints``), nor does the process that owns the
directory (``runtime.session.guard``). Start at ``chain``; README.md beside it has the protocol.
"""
