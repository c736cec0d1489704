"""From prompts to collections: keeping engines busy while accounting for every prompt.

Here: the producer with what it consists of (calls, slots, stock, settlement, filters), the
admission gate, rollout functions, the stop rule for serving errors and their record. Not here: the
states of prompts (``runtime.data.ledger``), the states of engines and their client
(``runtime.engines``), verifiers (``runtime.rewards``). Start reading at ``producer``, then
``flight`` for the life of one group and ``calls`` for the way of one request.
"""
