"""The drill: short runs of the real thing, killed at random, and what must hold of them afterwards.

``campaign`` is the story; ``catalogue`` what is done to a run, ``places`` where, ``dealing`` how;
``drilled`` is one run meanwhile, ``observing`` how it is seen to take it; ``promises`` is what must
hold of it at any moment, ``checks`` at its end. Nothing in a run knows that it is drilled, but for
the fault plan in its environment.
"""
