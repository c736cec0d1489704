"""The drill: short runs of the real thing, killed at random, and what must hold of them afterwards.

``campaign`` is the story, ``catalogue`` what is done to a run, ``observing`` how the run is seen to
take it, ``checks`` what must hold at its end. Nothing in a run knows that it is drilled, but for
the fault plan in its environment.
"""
