"""What runs in the server's own processes, under the server's own interpreter.

``launch`` starts the server and ends it with its owner; ``plugin`` is loaded by each of its
processes through the server's plugin framework. Nothing here may import what the server's
environment does not have: the standard library, torch and SGLang, and of ours only modules that
need no more than these. SGLang is not installed where the rest of the project is checked, so it
is imported by name and stays ``Any``.
"""
