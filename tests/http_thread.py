"""HTTP servers of tests, in a thread of this process."""

import threading
from socketserver import BaseServer

POLL_S = 0.02
"""The standard half a second between looks for the end is half a second for every test."""


def answer_in_thread(server: BaseServer) -> threading.Thread:
    """Answer until ``shutdown``, which returns at the thread's next look."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    return thread
