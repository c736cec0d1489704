"""What is asked, what came back, and where every prompt stands.

Here: prompts and their frozen copy, the order of a pass, the ledger, samples, collections. Not
here: verifiers (``runtime.rewards``) and anything that waits. Start at ``samples`` for the words,
then ``ledger`` for the rule that no prompt is lost or doubled.
"""
