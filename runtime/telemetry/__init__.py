"""What a run writes down about itself: logs, rows, stage times, metrics.

Nothing here may end a run, hold it up or cost it one per cent of an update: a full disk drops rows
and counts them, tracking that fails is logged once. What the rows *mean* for a person is
``runtime.analysis``; records that a resume depends on (chain, receipts) belong to
``runtime.rundir``. Start at ``rows``, then ``sinks``.
"""
