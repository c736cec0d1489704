"""What a run's files tell: reports and tools over a prepared output root.

Reads what the run wrote, leaves it untouched, writes only reports. Imports neither torch nor CUDA,
so any machine that sees the root can analyse it. Start at ``runfiles`` (reading), then ``report``.
"""
