"""What ranks tell the session can be read there, where there is no torch."""

import pickle
import subprocess
import sys

from runtime.publication.told import Description, SharedWeights, WrittenSnapshot
from runtime.trainer.operations import Operation, RankInfo
from runtime.trainer.protocol import StagedState, TrainMetrics


def test_values_that_travel_are_unpickled_without_torch() -> None:
    digests = {"sha256": {"w": "0"}}
    values = [
        Operation(epoch=1, update=2, name="step", serial=3),
        RankInfo(rank=0, host="h", pid=1),
        WrittenSnapshot(num_tensors=1, num_bytes=4, digests=digests),
        SharedWeights(num_tensors=1, num_bytes=4, digests=digests, buckets=()),
        Description(digests=digests, buckets=(), num_bytes=4),
        TrainMetrics,
        StagedState,
    ]
    code = (
        "import pickle, sys; read = pickle.loads(sys.stdin.buffer.read());"
        " print(len(read), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(values), capture_output=True, check=True
    )
    assert done.stdout.decode().split() == [str(len(values)), "False"]
