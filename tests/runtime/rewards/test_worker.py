"""What a worker sends, and when; and what it loads."""

import io
import math
import subprocess
import sys

import pytest

from runtime.rewards import worker
from runtime.rewards.verifiers import Verifier
from runtime.rewards.wire import HEADER, MAX_REPLY_BYTES, body_length, unpack


@pytest.mark.parametrize(
    ("verdicts", "frames"),
    [
        ([1.0, 0.0, 1.0], [[1.0, 0.0, 1.0]]),
        ([1.0, 0.0, ValueError("no")], [[1.0, 0.0], "ValueError: no"]),
        ([ValueError("no"), 1.0], ["ValueError: no"]),
        ([1.0, math.nan, 1.0], [[1.0], [math.nan]]),
    ],
)
def test_verdicts_of_an_instant_verifier_travel_together_up_to_what_is_none(verdicts, frames):
    """So that the pool charges the response which it is about, and no other."""

    def verifier(response, answer, metadata):
        if isinstance(verdict := verdicts[int(response)], Exception):
            raise verdict
        return verdict

    request = {
        "request": 7, "verifier": "v", "responses": ["0", "1", "2"][: len(verdicts)],
        "answer": None, "metadata": {}, "apart": False,
    }  # fmt: skip
    sent = sent_by(verifier, request)
    assert [frame.get("verdicts", frame.get("error")) for frame in sent] == [
        pytest.approx(each, nan_ok=True) if isinstance(each, list) else each for each in frames
    ]
    assert {frame["request"] for frame in sent} == {7}


def sent_by(verifier, request, **options):
    """The frames with which a worker answers for an instant verifier."""
    replies = io.BytesIO()
    instant = Verifier(verifier, {}, batched=False, is_instant=True)
    worker._serve(request, {"v": instant}, replies, worker.Tail(), **options)
    replies.seek(0)
    sent = []
    while header := replies.read(HEADER.size):
        sent.append(unpack(replies.read(body_length(header, limit=MAX_REPLY_BYTES))))
    return sent


@pytest.mark.parametrize(
    ("apart", "frames"), [(False, [[1, 1, 1], [1], [1, 1]]), (True, [[1]] * 6)]
)
def test_verdicts_travel_no_later_than_a_moment_after_the_last_ones(apart, frames):
    """A group of slow responses meets no limit as one, and whoever is retried waits for nobody."""
    clock = [0.0]

    def verifier(response, answer, metadata):
        clock[0] += float(response)
        return 1

    request = {
        "request": 7, "verifier": "v", "responses": ["0.01", "0.02", "0.03", "9", "0", "0.05"],
        "answer": None, "metadata": {}, "apart": apart,
    }  # fmt: skip
    sent = sent_by(verifier, request, now=lambda: clock[0])
    assert [frame["verdicts"] for frame in sent] == frames


def test_a_worker_loads_no_heavy_module():
    code = "import runtime.rewards.worker, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "ray", "numpy", "pyarrow", "transformers", "pydantic", "anyio", "sympy"}
    assert heavy.isdisjoint(done.stdout.split())
