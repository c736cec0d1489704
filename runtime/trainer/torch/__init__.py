"""The torch backend: HF model classes, packed rows, FSDP2 when there is more than one rank.

``backend`` is the facade and ``step`` the story of one update; each other file is about one noun.
What does not need torch (packing plans, contracts, advantages) lies one level up.
"""
