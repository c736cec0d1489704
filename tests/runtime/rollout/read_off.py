"""What tests read off collections and requests of a simulated world."""


def indices(collection):
    return [group.prompt.id.index for group in collection.groups]


def prompt_index(request):
    """From the request id; the simulated prompts all have the same tokens."""
    return int(request.rid.split("-")[1].split(":")[1])


def attempt(request):
    return int(request.rid.split("-")[2])
