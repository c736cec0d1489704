import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.clock import ManualClock
from runtime.policy import PolicyId
from runtime.telemetry import rows
from runtime.telemetry.rows import Flusher, Owner, RowWriter, encode

OWNER = Owner(attempt=2, epoch=3)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def writer(path: Path) -> RowWriter:
    return RowWriter(path, OWNER, clock=ManualClock(5.0))


def test_rows_carry_their_owner_and_keep_their_order(tmp_path: Path) -> None:
    rows_ = writer(tmp_path / "deep" / "r.jsonl")
    for i in range(5):
        rows_.append({"i": i})
    rows_.close()
    found = read(rows_.path)
    assert [row["i"] for row in found] == list(range(5))
    assert all(row["schema_version"] == 1 and row["epoch"] == 3 for row in found)
    assert all(row["attempt"] == 2 and row["time"] == 5.0 for row in found)
    assert (rows_.written, rows_.dropped) == (5, 0)


def test_a_row_is_frozen_when_it_is_appended(tmp_path: Path) -> None:
    rows_ = writer(tmp_path / "r.jsonl")
    values = {"a": [1]}
    rows_.append(values)
    values["a"].append(2)
    rows_.close()
    assert read(rows_.path)[0]["a"] == [1]


@given(st.dictionaries(st.text(min_size=1, max_size=4), json_values, max_size=4))
def test_every_encoded_row_is_strict_json_on_one_line(row: dict[str, object]) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    line = encode(row)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    back = json.loads(line, parse_constant=refuse)
    assert set(row) <= set(back)


def test_values_that_are_not_finite_are_null_and_named() -> None:
    row = {"values": {"train/loss": float("nan"), "ok": 1.5}, "list": [float("-inf")]}
    back = json.loads(encode(row))
    assert back["values"] == {"train/loss": None, "ok": 1.5}
    assert back["not_finite"] == {"values.train/loss": "nan", "list.0": "-inf"}


def test_scalars_of_numeric_libraries_and_ids_have_a_plain_form() -> None:
    row = {
        "n": np.float32(0.5),
        "i": np.int64(7),
        "p": PolicyId(1, 2),
        "f": Path("a/b"),
        "s": {"x"},
    }
    assert json.loads(encode(row)) == {"n": 0.5, "i": 7, "p": "e1.u2", "f": "a/b", "s": ["x"]}


def test_a_row_that_cannot_be_encoded_is_dropped_and_counted(tmp_path: Path) -> None:
    rows_ = writer(tmp_path / "r.jsonl")
    rows_.append({"x": object()})
    rows_.append({"x": 1})
    rows_.close()
    assert rows_.dropped == 1
    assert read(rows_.path)[0]["dropped_before"] == 1


def test_a_full_disk_drops_rows_counts_them_and_says_so_later(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.symlink_to("/dev/full")  # every write answers ENOSPC
    rows_ = writer(path)
    for i in range(3):
        rows_.append({"i": i})
    rows_.flush()
    assert (rows_.written, rows_.dropped) == (0, 3)
    path.unlink()
    rows_.append({"i": 3})
    rows_.append({"i": 4})
    rows_.close()
    first, second = read(path)
    assert first["dropped_before"] == 3
    assert "dropped_before" not in second


def test_a_disk_that_fills_in_the_middle_of_a_line_tears_only_that_line(tmp_path: Path) -> None:
    # The limit on file size cuts a write short just as a full disk does.
    code = f"""
import json, resource
from pathlib import Path
from runtime.clock import ManualClock
from runtime.telemetry.rows import Owner, RowWriter
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
path = Path({str(tmp_path / "r.jsonl")!r})
rows = RowWriter(path, Owner(attempt=1, epoch=1), clock=ManualClock())
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for i in range(20):
    rows.append({{"i": i}})
    rows.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
for i in range(20, 25):
    rows.append({{"i": i}})
rows.close()
print(json.dumps([rows.written, rows.dropped]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    written, dropped = json.loads(done.stdout)
    assert dropped > 0
    assert written + dropped == 25
    whole, torn = [], 0
    for line in (tmp_path / "r.jsonl").read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except ValueError:
            torn += 1
    assert torn == 1
    assert len(whole) == written
    assert sum(row.get("dropped_before", 0) for row in whole) == dropped
    assert [row["i"] for row in whole[-5:]] == [20, 21, 22, 23, 24]


def test_half_a_line_of_an_earlier_process_costs_no_row_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"whole":1}\n{"half":')
    rows_ = writer(path)
    rows_.append({"i": 1})
    rows_.close()
    whole, half, ours = path.read_text().splitlines()
    assert (whole, half) == ('{"whole":1}', '{"half":')
    assert json.loads(ours)["i"] == 1


def test_a_folder_that_cannot_be_made_costs_rows_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rows_ = writer(tmp_path / "file" / "r.jsonl")
    rows_.append({"i": 1})
    rows_.close()
    assert rows_.dropped == 1


def test_memory_is_bounded_while_nobody_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_BUFFERED_ROWS", 10)
    rows_ = writer(tmp_path / "r.jsonl")
    for i in range(15):
        rows_.append({"i": i})
    rows_.close()
    assert (rows_.written, rows_.dropped) == (10, 5)


def test_the_flusher_writes_everything_from_many_threads(tmp_path: Path) -> None:
    flusher = Flusher(interval_s=0.01)
    writers = [flusher.add(writer(tmp_path / f"{n}.jsonl")) for n in range(3)]
    flusher.start()

    def work(who: int) -> None:
        for i in range(200):
            writers[i % 3].append({"who": who, "i": i})

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert flusher.close()
    found = [row for w in writers for row in read(w.path)]
    assert len(found) == 800
    for who in range(4):
        for w in writers:
            mine = [row["i"] for row in read(w.path) if row["who"] == who]
            assert mine == sorted(mine)  # type: ignore[type-var]
