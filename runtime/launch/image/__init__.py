"""Images of a commit: one layer, the committed tree, over a locked base.

Here belong reading the checkout, talking to a registry, laying the layer, and finding out what an
image is. Which image a run uses is the run file's business (``runtime.launch.image.choosing``).
Start at ``building``; nothing here needs a container engine but ``buildkit``.
"""
