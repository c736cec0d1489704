"""How a response becomes a number, and what happens when the judge of it fails.

Here: verifiers, the killable processes they run in, the budget for their failures, shaping. Not
here: advantages (``runtime.trainer``) and filters on judged groups (``runtime.rollout``). Start at
``verifiers`` to add one, at ``workers`` for what a hanging or dying one costs.
"""
