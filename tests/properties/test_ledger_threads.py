"""Many threads at one ledger: no admission twice, no count wrong."""

import threading
from concurrent.futures import ThreadPoolExecutor

from runtime.data.history import read_history
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder

NUM_PROMPTS = 4000
THREADS = 4


def test_threads_share_the_prompts_and_none_is_lost():
    ledger = Ledger(PromptOrder(NUM_PROMPTS, seed=3))
    history = [ledger.snapshot()]
    ledger.committed(history[0])
    start = threading.Barrier(THREADS + 1)
    done = threading.Event()

    def produce(thread: int) -> list:
        start.wait(10)
        mine = []
        while (admission := ledger.admit()) is not None:
            key = (admission.prompt_id, admission.attempt)
            if admission.attempt == 1 and admission.prompt_id.index % 5 == thread:
                assert ledger.requeue(*key, "transport")
            elif admission.prompt_id.index % 7 == thread:
                assert ledger.filter(*key)
            else:
                assert ledger.finish(*key)
                mine.append(key)
        return mine

    def commit() -> None:
        start.wait(10)
        while not done.is_set():
            segment = ledger.snapshot()
            history.append(segment)
            ledger.committed(segment)
            ledger.check()

    with ThreadPoolExecutor(THREADS + 1) as pool:
        committing = pool.submit(commit)
        finished = [
            key for f in [pool.submit(produce, i) for i in range(THREADS)] for key in f.result()
        ]
        done.set()
        committing.result()
    ledger.consume(finished, 1)
    history.append(ledger.snapshot())
    report = read_history(history)
    assert len(finished) == len(set(finished)) == report.consumed
    assert report.consumed + report.filtered == NUM_PROMPTS
    assert report.lost == report.doubled == report.pending == report.remaining == 0
    assert report == read_history([joined(history)])


def joined(history):
    """All ends of a history in one segment, as if no commit had been made in between."""
    columns = {}
    for kind in ("consumed", "filtered", "dropped", "skipped"):
        parts = [getattr(segment, kind) for segment in history]
        names = type(parts[0]).model_fields
        columns[kind] = type(parts[0])(
            **{name: tuple(x for part in parts for x in getattr(part, name)) for name in names}
        )
    return history[-1].model_copy(update={"parent": None, **columns})
