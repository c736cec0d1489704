"""What a job with GPUs looks at before it reads data or a model, on the host it got.

Network names first, then attention, then the rest; the environment is handed on as corrected. A
table of what was found goes to the job's log, and the first thing that cannot work ends the start.
"""

from runtime.launch.preflight.checks import corrected, preflight

__all__ = ["corrected", "preflight"]
