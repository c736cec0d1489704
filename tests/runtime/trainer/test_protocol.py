import pickle
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.trainer.protocol import TrainBatch
from tests.runtime.trainer.tiny import make_sequences


@settings(max_examples=25)
@given(st.integers(0, 99), st.integers(0, 4), st.integers(1, 5))
def test_a_batch_travels_whole_and_in_few_pieces(seed: int, groups: int, samples: int) -> None:
    sequences = make_sequences(seed, groups=groups, samples=samples) if groups else ()
    if seed % 2:  # as a served teacher's likeliest two at each token
        sequences = tuple(
            replace(
                s,
                teacher_logprobs=np.repeat(s.logprobs, 2),
                teacher_ids=np.arange(2 * len(s.logprobs), dtype=np.int32),
            )
            for s in sequences
        )
    batch = TrainBatch(update=7, sequences=sequences, consumed_digest="d")
    pieces: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=pieces.append)
    assert len(pieces) <= 14
    found = pickle.loads(data, buffers=pieces)
    assert (found.update, found.consumed_digest) == (7, "d")
    assert len(found.sequences) == len(sequences)
    for ours, theirs in zip(sequences, found.sequences, strict=True):
        for name in ours.__slots__:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert np.array_equal(a, b), name
            assert not isinstance(a, np.ndarray) or a.dtype == b.dtype, name
