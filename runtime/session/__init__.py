"""The life of a run's processes: the guard, the session it starts, and the steps that flows ensure.

Here belong ownership of an attempt, the boundary sequence, retries and holding. What a boundary
does inside a room (publishing, committing, evaluating) does not. Start at ``driver`` for the life
of one training step, at ``guard`` for who owns a run, at ``ensure`` for how a flow sees it.
"""
