"""SGLang as an engine: the real server as a child process, over the same HTTP contract.

Here: its settings and command line, its environment, and the owner of its process group. ``inside``
is what runs in the server's own processes, with the server's own interpreter. Not here: the client,
which is the one of all engines. Start at ``owner``; docs/engine-contract.md lists how this engine
differs from the embedded one.
"""
