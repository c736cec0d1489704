"""The drill: short runs of the real thing, killed at random, and what must hold of them afterwards.

``campaign`` is the story, ``catalogue`` what is done to a run and ``places`` where, ``dealing`` how,
``drilled`` one run meanwhile, ``observing`` how it is seen to take it, ``checks`` what must hold at
its end, ``promises`` what must hold of it at any moment. Nothing in a run knows that it is drilled, but for
the fault plan in its environment.
"""
