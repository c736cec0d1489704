"""Recipes make everything a first run needs, locally: a model, its tokenizer and data.

Nothing here is training machinery; a recipe ends with an HF folder and JSONL files that the rest of
the system reads like anyone else's. Start at ``laptop.make``.
"""
