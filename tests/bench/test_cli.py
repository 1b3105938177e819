# SPDX-License-Identifier: Apache-2.0
"""Commands print what they found on stdout, say what is wrong in one sentence on stderr, and exit accordingly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import sparsetir
from sparsetir import cli
from sparsetir.bench import MissingPackageError, measure, report, roofline
from sparsetir.cli import main, shortened
from sparsetir.codegen.cache import write_cache
from sparsetir.tuning.loop import TrialLoop

pytestmark = pytest.mark.usefixtures("quick_ceilings")

PROGRAM = """
from __future__ import annotations
from tvm.script import sparsetir as T
{extra}

@T.prim_func
def scale(a: T.handle, b: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I, J), "float32")
    with T.sp_iter([I, J], "SS", "scale") as [i, j]:
        B[i, j] = A[i, j] * T.float32(2)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of a test go to a folder of its own."""
    monkeypatch.setenv("SPARSETIR_CACHE", str(tmp_path / "cache"))
    yield
    write_cache()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small matrix in a file."""
    path = tmp_path / "small.mtx"
    matrix = sp.random_array((40, 30), density=0.1, format="coo", rng=np.random.default_rng(0))
    scipy.io.mmwrite(path, matrix)
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(extra=""))
    return path


@pytest.mark.slow
def test_the_demo(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["demo", "--matrix", str(small), "--feat", "8", "--seconds", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in (
        "40 x 30",
        "def spmm(",
        "T.sp_iter",
        "trials/s",
        "T.vectorized",
        "GFLOP/s",
        "sparsetir, ",
        "scipy",
    ):
        assert part in shown.out
    table = shown.out.partition("== Time of a call")[2]
    assert ("sparsetir, tuned" in table) is ("sparsetir, untuned (nothing" not in table)
    for figure in re.findall(r"sparsetir, [^\d]*([\d.e-]+) ", table):  # those of the search
        assert f" {figure} " in shown.out.partition("== Time of a call")[0]
    assert (out / "tuning.jsonl").stat().st_size > 100
    assert json.loads((out / "tuning.jsonl").read_text().splitlines()[0])["choices"]["tile"] == 64


@pytest.mark.slow
def test_the_demo_without_matplotlib(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def require(*_args: object, **_kwargs: object) -> None:
        raise MissingPackageError("drawing needs matplotlib; try: pip install 'sparsetir[plot]'")

    monkeypatch.setattr("sparsetir.workloads.plot.require", require)
    out = tmp_path / "out"
    assert main(["demo", "--matrix", str(small), "--op", "spmv", "--seconds", "0.5", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("no picture: drawing needs matplotlib") == 2


@pytest.mark.slow
def test_the_demo_of_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.tns"
    path.write_text("".join(f"{i % 3 + 1} {i % 5 + 1} {i % 7 + 1} {i + 1}.5\n" for i in range(40)))
    arguments = ["--op", "mttkrp", "--feat", "8", "--seconds", "0.5", "--out", str(tmp_path / "out")]
    assert main(["demo", "--matrix", str(path), *arguments]) == 0
    assert "numpy" in capsys.readouterr().out
    assert main(["demo", *arguments]) == 2
    assert "--matrix" in capsys.readouterr().err


@pytest.mark.slow
def test_tune(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, database = tmp_path / "out", tmp_path / "records.jsonl"
    arguments = ["tune", str(small), "--op", "sddmm", "--feat", "8", "--trials", "2", "--seed", "3"]
    assert main([*arguments, "--database", str(database), "--out", str(out), "--json", str(out / "result.json")]) == 0
    assert "2 trials, 0 from the database" in capsys.readouterr().out
    facts = json.loads((out / "result.json").read_text())
    assert len(facts["history"]) == 2
    assert facts["speedup"] >= 1
    assert "def sddmm" in (out / "loops.txt").read_text()
    assert "best" in (out / "report.txt").read_text()

    assert main([*arguments, "--database", str(database), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["history"][0]["reused"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tune", "missing.mtx", "--op", "spmm"], "there is no file missing.mtx"),
        (["tune", "{small}", "--op", "mttkrp"], "mttkrp takes a sparse operand of 3 dimensions, got 40 x 30"),
        (["tune", "{small}"], "--op"),
        (["tune", "{small}", "--op", "spmm", "--feat", "0"], "positive"),
        (["tune", "{small}", "--op", "spmm", "--seed", "-1"], "--seed: expected a number that is not negative"),
        (["tune", "{program}", "--op", "spmm"], "no known extension"),
        (["show", "{small}"], "is no Python script; expected SCRIPT.py or SCRIPT.py:FUNC; sparsetir formats shows"),
        (["show", "."], ". is a folder"),
        (["show", "missing.py"], "there is no script missing.py"),
        (["show", "{program}:other"], "defines no program 'other'; it defines scale"),
        (["show", "{program}", "--stage", "9"], "invalid choice"),
        (["nothing"], "invalid choice"),
        ([], "command"),
    ],
)
def test_wrong_use(
    arguments: list[str], said: str, small: Path, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.format(small=small, program=program) for a in arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a short run, in which the ceilings are not measured."""
    rates = {level.name: 1e11 for level in roofline.levels()} | {"DRAM": 1e10}
    found = roofline.Roofline(roofline.levels(), {1: roofline.Ceilings(1, 1e11, rates)})
    monkeypatch.setattr(report, "ceilings", lambda: found)
    return ["--rounds", "1", "--rest", "0", "--repeat", "0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two matrices, two tensors, a file that is no matrix, and one that is nothing of the kind."""
    rng = np.random.default_rng(3)
    (tmp_path / "data").mkdir()
    scipy.io.mmwrite(tmp_path / "data" / "square.mtx", sp.random_array((40, 40), density=0.1, rng=rng))
    sp.save_npz(tmp_path / "data" / "wide.npz", sp.random_array((20, 90), density=0.2, format="csr", rng=rng))
    (tmp_path / "data" / "cube.tns").write_text("1 1 1 2.0\n2 2 2 1.0\n")
    (tmp_path / "data" / "deep.tns").write_text("1 1 1 1 2.0\n")
    (tmp_path / "data" / "broken.mtx").write_text("no matrix\n")
    (tmp_path / "data" / "notes.md").write_text("nothing\n")
    return tmp_path / "data"


@pytest.mark.slow
def test_bench_of_files(folder: Path, tmp_path: Path, quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    files = ["--markdown", str(out / "speed.md"), "--json", str(out / "speed.json"), "--plot", str(out / "roof.png")]
    assert main(["bench", "--data", str(folder), "--ops", "spmm:3,spmm:40,spmv,sddmm:8,mttkrp:4", *files, *quick]) == 0
    shown = capsys.readouterr()
    assert "broken.mtx is not a readable .mtx file" in shown.err
    assert "skipped: deep has 4 dimensions" in shown.err
    assert shown.out.count("geometric mean") == 4
    facts = json.loads((out / "speed.json").read_text())
    measured = {(row["name"], row["op"], row["feat"]) for row in facts["rows"]}
    expected = {(m, *p) for m in ("square", "wide") for p in (("spmm", 3), ("spmm", 40), ("spmv", 1), ("sddmm", 8))}
    assert measured == expected | {("cube", "mttkrp", 4)}
    for row in facts["rows"]:
        assert row["ours"]["untuned"]["t_fair/t"] == pytest.approx(row["t_fair"] / row["ours"]["untuned"]["median"])
        assert {"median", "min", "max", "spread"} <= set(row["peers"].popitem()[1])
    assert set(facts["summaries"]["spmm"]["vs scipy"]) == {"geometric mean", "smallest"}
    assert (out / "speed.md").read_text().count("\n| wide |") == 4
    assert (out / "roof.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bench_of_generated_inputs(quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "empty,tensor_skewed", "--json", "-", *quick]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in facts["rows"]] == ["empty"] * 3 + ["tensor_skewed"]
    assert [row["op"] for row in facts["rows"]] == ["spmm", "sddmm", "spmv", "mttkrp"]


@pytest.mark.slow
def test_bench_tunes_with_a_database(
    folder: Path, tmp_path: Path, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "trials.jsonl"
    options = ["--ops", "spmm:8", "--tune", "0.5", "--database", str(database), *quick]
    assert main(["bench", str(folder / "wide.npz"), *options]) == 0
    assert "tuned vs best peer" in capsys.readouterr().out
    assert database.stat().st_size > 0


@pytest.mark.slow
def test_bench_finds_wrong_results(
    folder: Path, quick: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsetir.workloads.reference.TOLERANCE", -1.0)
    assert main(["bench", str(folder / "wide.npz"), "--ops", "spmm:8,spmv", *quick]) == 1
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert text.count("our result differs from the reference") == 2
    assert "wide spmm:8, untuned: our result differs" in shown.out


@pytest.mark.slow
def test_bench_shows_what_it_has_when_interrupted(
    folder: Path, tmp_path: Path, quick: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(case: object, _plan: object) -> dict[str, object]:
        if case.op == "spmv":
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(measure, "KINDS", [*measure.KINDS, stop])
    written = ["--json", str(tmp_path / "speed.json")]
    assert main(["bench", str(folder / "wide.npz"), "--ops", "spmm:8,spmv", *written, *quick]) == 130
    assert "wide" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "speed.json").read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected files with matrices, --data FOLDER or --suite NAME, got none"),
        (["missing.mtx"], "there is no file missing.mtx"),
        (["--data", "missing"], "there is no folder missing"),
        (["--suite", "random"], "got 'random'"),
        (["--suite", "empty", "--size", "huge"], "invalid choice"),
        (["--suite", "empty", "--ops", "gemm"], "got 'gemm'"),
        (["--suite", "empty", "--ops", "spmm:8,x"], "got 'x'"),
        (["--suite", "empty", "--ops", "mttkrp:4"], "nothing could be measured"),
        (["--suite", "empty", "--rounds", "0"], "positive"),
        (["--suite", "empty", "--rest", "-1"], "expected a finite number of seconds, not negative, got '-1'"),
        (["--suite", "empty", "--tune", "nan"], "expected a finite number of seconds, not negative, got 'nan'"),
        (["--suite", "empty", "--repeat", "-1"], "not negative, got -1"),
        (["--suite", "empty", "--threads", "9999"], "asked for 9999 threads"),
    ],
)
def test_wrong_use_of_bench(
    arguments: list[str], said: str, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # The options of the case come last, so that they count.
    assert main(["bench", *quick, *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("1", "T.sp_iter([I, J]"),
        ("2", "T.sblock"),
        ("3", "T.parallel"),
        ("llvm", "define"),
        ("asm", ".text"),
    ],
)
def test_show(stage: str, said: str, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{program}:scale", "--stage", stage]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PROGRAM.format(extra="import no_such_module"), "cannot be run: ModuleNotFoundError"),
        ("x = 1\n", "defines no program"),
        (PROGRAM.format(extra="").replace("B[i, j] =", "B[i] ="), "program.py"),
    ],
)
def test_scripts_that_are_wrong(text: str, said: str, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text(text)
    assert main(["show", str(program)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.slow
def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "sparsetir",
        "apache-tvm",
        "target",
        "threads",
        "kernel cache",
        "process caches",
        "front doors 256",
        "memory",
        "GB/s",
    ):
        assert part in shown


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for named in ([], ["demo"], ["tune"], ["formats"], ["bench"], ["show"], ["info"]):
        assert main([*named, "--help"]) == 0
        assert "usage: sparsetir" in capsys.readouterr().out


def test_every_table_of_bench_has_a_name() -> None:
    folder = Path(cli.__file__).parent / "bench"
    modules = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text()} | {"training"}
    assert set(cli.TABLES) == modules


@pytest.mark.slow
def test_help_of_every_table_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.TABLES:
        assert main(["bench", name, "--help"]) == 0
        assert f"usage: sparsetir bench {name} " in capsys.readouterr().out
    assert main(["bench", "orders", "--families", "no such"]) == 2


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for said in ("(default: 128)", "(default: guided)", "(default: standard)", "(default: that of the preset)"):
        assert said in shown
    assert "None" not in shown
    assert "exit status: 0 done" in shown
    assert main(["--version"]) == 0
    assert re.match(r"sparsetir \d+\.\d+\.\d+ \(apache-tvm ", capsys.readouterr().out)


def test_an_interrupted_search_says_so(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_args: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialLoop, "explore", stop)
    assert main(["tune", str(small), "--op", "spmv", "--trials", "3"]) == 130
    assert "(interrupted)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_with_nothing_left_to_measure_says_so(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", str(small), "--op", "spmv", "--trials", "2", "--database", str(tmp_path / "tuning.jsonl")]
    assert main(arguments) == 0
    assert "nothing was measured" not in capsys.readouterr().err
    assert main(arguments) == 0
    assert "a larger --trials searches on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("real general\n0 0 0\n", "is 0 x 0 without entries"),
        ("real general\n3 4 0\n", "is 3 x 4 without entries"),
        ("complex general\n1 1 1\n1 1 1.0 2.0\n", "holds complex numbers"),
    ],
)
@pytest.mark.parametrize("command", [["tune", "--op", "spmm"], ["demo", "--matrix"]])
def test_files_with_nothing_to_time(
    head: str, said: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.mtx"
    path.write_text(f"%%MatrixMarket matrix coordinate {head}")
    assert main([*command, str(path)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_formats_time_no_complex_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sp.save_npz(tmp_path / "A.npz", sp.csr_array(np.eye(4) * 1j))
    assert main(["formats", str(tmp_path / "A.npz"), "--feat", "4"]) == 2
    assert "holds complex numbers" in capsys.readouterr().err


@pytest.mark.slow
def test_formats_are_listed_once_the_fastest_first(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", str(small), "--feat", "8", "--most", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("format "))
    rows = [line.split() for line in lines[begin + 1 :] if re.match(r"[a-z_]+\(", line)]
    gains = [float(row[-2]) for row in rows if row[-2] != "-"]
    assert len(gains) > 3
    assert gains == sorted(gains, reverse=True)
    assert len({tuple(row) for row in rows}) == len(rows)


def test_the_package_is_imported_without_tvm() -> None:
    program = "import sparsetir, sparsetir.cli, sys; sparsetir.cli.parser().format_help(); print('tvm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_completion_shows_what_is_public() -> None:
    assert set(dir(sparsetir)) >= set(sparsetir.__all__)
    assert not {"Any", "sys", "importlib", "annotations", "ModuleType"} & set(dir(sparsetir))
    kernel = sparsetir.build(sparsetir.ops.spmv())
    shown = {name for name in dir(kernel) if name[0] != "_"}
    names = {"bind", "export", "func", "name", "save", "script", "signature", "source", "target", "time", "trace"}
    assert shown == names


def test_long_programs_are_shortened() -> None:
    assert shortened("# from x\n\na\nb\nc\n", 2) == "a\nb\n... (1 more lines)"


@pytest.mark.slow
def test_in_a_process_of_its_own(program: Path) -> None:
    command = [sys.executable, "-m", "sparsetir", "show", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "def scale(" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "message"),
    {
        "formats small.mtx --plot picture": "path: expected a name that ends in .png",
        "formats small.mtx --plot picture.nothing": "path: expected a name that ends in .png",
        "bench small.mtx --plot picture.nothing": "path: expected a name that ends in .png",
        "calibrate --seconds 600 --plot picture.nothing": "path: expected a name that ends in .png",
        "calibrate --seconds 600 --json .": "--json: expected a file, got the folder .",
        "bench small.mtx --markdown .": "--markdown: expected a file, got the folder .",
        "spmm blocks --dense two.npz --out C.npy": "--dense: expected a file of one array",
        "tune small.mtx --op spmm --trials 1 --feat 99999999999999999999": "feat: expected dense operands within",
        "tune small.mtx --op spmm --seed -1": "expected a number that is not negative",
        "collect points.jsonl --seed -5": "expected a number that is not negative",
        "pretrain none.jsonl --out model.json": "expected records of at least 8 trials of one case in none.jsonl",
        "show leaves.py": "leaves.py cannot be run: SystemExit",
    }.items(),
)
def test_wrong_use_is_one_line(
    command: str, message: str, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small.parent)
    if command.startswith("spmm"):
        sparsetir.save_blocks(sp.eye_array(4, format="csr", dtype="float32"), "blocks", rows=3)
    np.savez("two.npz", one=1)
    Path("leaves.py").write_text("raise SystemExit(3)")
    assert main(command.split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
