"""A user's verifiers, which note their calls, and a pool that runs them."""

import os
import select
import textwrap

import anyio

from runtime.data.samples import Prompt, PromptId
from runtime.rewards.verifiers import VerifierSpec
from runtime.rewards.workers import VerifierPool

MODULE = textwrap.dedent(
    '''
    """A user's verifiers; each notes its calls, so that tries can be counted."""
    import ctypes, os, signal, subprocess, sys, time

    def note(metadata, response):
        with open(metadata["calls"], "a") as file:
            file.write(f"{os.getpid()} {response}\\n")

    def length(response, answer, metadata, plus=0):
        note(metadata, response)
        return len(response) + plus

    def lengths(responses, answer, metadata):
        note(metadata, "+".join(responses))
        return [len(r) for r in responses]
    lengths.batched = True

    def one_verdict(responses, answer, metadata):
        note(metadata, "+".join(responses))
        return [1.0]

    def misbehave(response, answer, metadata):
        note(metadata, response)
        if response == "hang": time.sleep(3600)
        if response == "spin in C": pow(7, 10 ** 9)  # holds the interpreter lock
        if response == "raise": raise ValueError("no such answer")
        if response == "exit": sys.exit(3)
        if response == "segfault": ctypes.string_at(0)
        if response == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if response == "memory": return len(bytearray(1 << 31))
        if response == "none": return None
        if response == "nan": return float("nan")
        if response == "inf": return float("inf")
        if response == "text": return "1.0"
        if response == "list": return [1.0]
        if response == "huge": return 10 ** 400
        if response == "print":
            print("to stdout"); os.write(1, b"straight to the descriptor")
            sys.stderr.write("to stderr"); sys.stdin.read()
        if response == "printed": print("a clue"); raise ValueError
        if response == "forge":  # guesses the descriptor of the frames
            for fd in range(3, 20):
                try: os.write(fd, b"\\x00\\x00\\x00\\x02{}" if answer == "short" else b"\\xff" * 64)
                except OSError: pass
        if response == "deep":
            body = b"[" * 500000
            for fd in range(3, 20):
                try: os.write(fd, len(body).to_bytes(4, "big") + body)
                except OSError: pass
        if response == "child":
            child = subprocess.Popen(["sleep", "3600"])
            with open(metadata["calls"] + ".child", "a") as file: file.write(f"{child.pid}\\n")
            time.sleep(3600)
        if response.startswith("once"):
            flag = metadata["calls"] + "." + response
            if not os.path.exists(flag):
                open(flag, "w").close()
                os._exit(1)
        return 1.0
    '''
)


class Calls:
    def __init__(self, path):
        self.path = path

    def prompt(self, function, answer=None):
        return Prompt(
            id=PromptId(0, 5),
            token_ids=(1,),
            text="?",
            answer=answer,
            verifier=f"their_verifiers:{function}",
            metadata={"calls": str(self.path)},
        )

    @property
    def responses(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.partition(" ")[2] for line in lines]

    async def seen(self, response):
        """Wait until another process has noted this call; nothing but its file can say so."""
        with anyio.fail_after(30):
            while self.responses != [response]:  # noqa: ASYNC110 - no event crosses processes
                await anyio.sleep(0.01)

    @property
    def pids(self):
        return [int(line.partition(" ")[0]) for line in self.path.read_text().splitlines()]


def pool(module, *names, **options):
    specs = [
        name if isinstance(name, VerifierSpec) else VerifierSpec(name=f"their_verifiers:{name}")
        for name in names
    ]
    return VerifierPool(specs, search_paths=[module], **({"workers": 1} | options))


def wait_gone(pid, timeout_s=10):
    """Wait for the end of a process that need not be a child of ours."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], timeout_s)[0], f"process {pid} lives on"
    finally:
        os.close(fd)
