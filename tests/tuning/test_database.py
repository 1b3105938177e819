# SPDX-License-Identifier: Apache-2.0
"""Databases that are not sound: other files, fields of other types, full disks. And what interrupts a search."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparsetir
from each import examples
from sparsetir.errors import ArgumentTypeError, TuningError
from sparsetir.formats.encoding import parse_format
from sparsetir.schedules import Choices
from sparsetir.transform.schedule import Trace
from sparsetir.tuning.records import Database, Key, Record
from sparsetir.tuning.train.collect import Labelled

pytestmark = pytest.mark.usefixtures("quick_comparisons")

KEY = Key("spmm", "p", "q", {"m": 3}, "float32", "llvm", "here", 2, "v")
RECORD = Record(Choices(chunks=2), "bsr(r=4, c=4)", {"feat": 8}, 1e-3, 1e-3, 0.1, None, 2e-3, 0.5, 1.5, 7)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of one record."""
    found = tmp_path / "records.jsonl"
    records = Database(found)
    records.append(KEY, RECORD)
    records.close()
    return found


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    for name, text in {"w.mtx": b"%%MatrixMarket matrix\n1 1 0\n", "x.json": b'{"a": 1}\n', "y": b"\x7fELF\0"}.items():
        other = tmp_path / name
        other.write_bytes(text)
        for use in (lambda db: db.load(KEY), lambda db: list(db.everything()), lambda db: db.append(KEY, RECORD)):
            with pytest.raises(TuningError, match=f"{name} is no database: expected lines of records"):
                use(Database(other))
        assert other.read_bytes() == text
    with pytest.raises(TuningError, match="cannot be read"):
        Database(tmp_path).load(KEY)


def test_a_search_refuses_the_file_before_it_begins(tmp_path: Path) -> None:
    other = tmp_path / "w.mtx"
    other.write_text("%%MatrixMarket matrix\n")
    inputs = {"A": sp.eye_array(4, format="csr", dtype="float32"), "B": np.ones((4, 2), "float32")}
    with pytest.raises(TuningError, match=r"w\.mtx is no database"):
        sparsetir.tune_sparse(sparsetir.ops.spmm(), inputs, max_trials=1, database=other, isolate=False)
    assert other.read_text() == "%%MatrixMarket matrix\n"


def test_an_empty_file_and_a_cut_line_are_databases(tmp_path: Path, path: Path) -> None:
    for begun in (b"", path.read_bytes()[:40]):
        held = tmp_path / "begun.jsonl"
        held.write_bytes(begun)
        records = Database(held)
        records.append(KEY, RECORD)
        records.close()
        assert len(Database(held).load(KEY)) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fields_of_any_type_are_read_or_skipped(path: Path, data: st.DataObject) -> None:
    (line,) = lines_of(path)
    name = data.draw(st.sampled_from(sorted(line)))
    whole = path.read_text()
    line[name] = data.draw(VALUES)
    path.write_text(json.dumps(line) + "\n")
    for record in Database(path).load(KEY):
        assert record.candidate.choices == RECORD.choices or name == "choices"
        assert record.seconds is None or record.seconds * 2 is not None
    for key, record, _ in Database(path).everything():
        assert isinstance(key.sizes, dict)
        assert str(record.candidate)
    path.write_text(whole)


def test_deeply_nested_lines_are_skipped(path: Path) -> None:
    path.write_text(path.read_text() + "[" * 100000 + "\n" + '{"format": ' * 3000 + "\n")
    assert len(Database(path).load(KEY)) == 1


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


NO_SPACE = r"records\.jsonl cannot be written: No space left on device; try"


def test_a_full_disk_is_said_each_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", full)
    for _ in range(2):
        with pytest.raises(TuningError, match=NO_SPACE):
            Database(path).append(KEY, RECORD)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_fills_up_later_costs_no_search(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    records = Database(path)
    records.append(KEY, RECORD)
    monkeypatch.setattr(os, call, full)
    with pytest.warns(RuntimeWarning, match=f"no more trials are recorded: .*{NO_SPACE}"):  # noqa: PT031
        records.append(KEY, RECORD)
        records.append(KEY, RECORD)
        records.close()
    monkeypatch.undo()
    assert len(records.load(KEY)) == 1
    records.append(KEY, RECORD)  # of another search
    records.close()


def test_collected_trials_must_be_recorded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Labelled(path)
    records.append(KEY, RECORD)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TuningError, match=NO_SPACE):
        records.append(KEY, RECORD)


def test_a_device_or_a_pipe_is_no_database(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(TuningError, match=f"the database {path} is no file"):
            Database(path).load(KEY)
        with pytest.raises(TuningError, match=f"the database {path} is no file"):
            Database(path).append(KEY, RECORD)


def test_a_line_that_is_written_in_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
    with pytest.raises(TuningError, match="No space left"):
        Database(path).append(KEY, RECORD)
    monkeypatch.undo()
    records = Database(path)
    records.append(KEY, RECORD)
    records.close()
    assert len(list(Database(path).everything())) == 2


# ---------------------------------------------------------------------------------------------- texts


NO_FORMATS = ["-" * 3000 + "1", "(" * 150, "bsr(r=[])", "ell(k={})", "bsr(r={[]: 1})", "bsr(q=1)", "\0", 3, "x.y()"]


@pytest.mark.parametrize("text", NO_FORMATS)
def test_texts_that_are_no_formats(text: Any) -> None:
    with pytest.raises(sparsetir.SparseTIRError) as caught:
        parse_format(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100000,
        '[["pad", ["spmm", "K"], {}]]',
        '[["to_dense", ["spmm", "J"], {"x": 1}]]',
        '[["sparse_fuse", ["spmm", true], {}]]',
        '[["decompose", [{"A": {"format": [], "parameters": {}}}], {}]]',
        '[["decompose", [{"A": {"format": "bsr", "parameters": {"q": 1}}}], {}]]',
        '[["decompose", [[1]], {}]]',
        f'[["pad", ["spmm", "K", 1{"0" * 400}], {{}}]]',
        '[["sparse_split", ["spmm", "K", "8"], {}]]',
        '[["sparse_reorder", [null, null], {}]]',
    ],
)
def test_texts_that_are_no_traces(text: str) -> None:
    with pytest.raises(sparsetir.SparseTIRError) as caught:
        Trace.from_json(text).apply(sparsetir.ops.spmm())
    assert len(str(caught.value)) < 1000


# ---------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_of_a_build_is_one() -> None:
    """Wherever it arrives, also inside a pass that TVM calls."""

    def interrupt(_sch: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sparsetir.build(sparsetir.ops.spmm(), schedule=interrupt)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for n in range(8):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.004 * n)
                while True:
                    sparsetir.lower(sparsetir.ops.spmm(), stage=3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


ORPHANS = """
import sys, time
import numpy as np, scipy.sparse as sp, sparsetir
from sparsetir.tuning.workers.local import Process
process = Process()
process.connection.send(("begin", ()))
process.connection.send_bytes(b"cbuiltins\\neval\\n(S'__import__(\\"time\\").sleep(1000)'\\ntR.")
print(process.process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_worker_inside_a_candidate_ends_with_its_parent() -> None:
    tuner = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert tuner.stdout is not None
    worker = int(tuner.stdout.readline())
    time.sleep(2)  # it may have begun
    tuner.kill()
    tuner.wait()
    tuner.stdout.close()
    stop = time.monotonic() + 120
    while _is_there(worker) and time.monotonic() < stop:
        time.sleep(0.1)
    assert not _is_there(worker)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


@pytest.mark.parametrize("database", [5, b"x"])
def test_a_database_is_named_by_a_path(database: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="database: expected the path of a file of records"):
        sparsetir.build(sparsetir.ops.spmm(), database=database)
    with pytest.raises(ArgumentTypeError, match="database: expected the path of a file of records"):
        sparsetir.autotune(configs=[Choices()], database=database)(sparsetir.ops.spmm())


def test_the_key_of_configurations_is_a_list() -> None:
    with pytest.raises(ArgumentTypeError, match="key: expected a list of names of sizes, got 'nnz'"):
        sparsetir.autotune(configs=[Choices()], key="nnz")
