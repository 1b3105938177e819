# SPDX-License-Identifier: Apache-2.0
"""The command line. Results go to stdout and progress to stderr; exit status 0 done, 1 a finding, 2 wrong use."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from sparsetir.errors import ArgumentError, SparseTIRError
from sparsetir.utils.files import write_text, writing_file

DONE, FINDING, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
STATUS = "exit status: 0 done, 1 a finding (a wrong result, a format that failed), 2 wrong use, 130 interrupted"
OPS = ("spmm", "spmv", "sddmm", "mttkrp")
PRESETS = ("quick", "standard", "thorough")
MAX_MESSAGE = 400
LOOPS_SHOWN = 90
REPEATED_BYTES, SMALLEST_COPY = 16 << 20, 64 << 10
TABLES = {
    "attention": "attention under masks and of jagged batches, beside torch",
    "blocks": "products and PCA of matrices on disk",
    "cluster": "a cost model of several machines, checked against workers on this one",
    "conversions": "kernels that convert their matrix by themselves",
    "expressions": "index notation beside ready programs and other libraries",
    "formats": "memory, padding, conversion and SpMM of every format of a matrix",
    "grouped": "grouped products beside torch",
    "orders": "chains of matrices: the order taken beside all orders",
    "overhead": "calls, compilation, caches and imports",
    "pruned": "a pruned transformer layer beside dense torch",
    "retrieval": "the best documents of queries",
    "scipy_traces": "programs under sparsetir.scipy.accelerate beside plain scipy",
    "search": "searches beside a coarse sweep and other seeds",
    "search_rate": "trials per second of searches",
    "solvers": "scipy's iterative solvers on a linear operator",
    "structures": "when a structure of edges pays under patch_pyg",
    "sweep": "matrices of a family by number of nonzeros",
    "training": "epochs of graph networks beside torch and torch_geometric",
}
PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "scipy", "xgboost", "torch", "mkl", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        Without the program's name; by default what the process was started with.

    Returns
    -------
    int
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["bench"] and words[1:2] and words[1] in TABLES:
            status = run_table(words[1], words[2:])
        else:
            args = parser().parse_args(words)
            check_files(args)
            status = args.run(args)
        sys.stdout.flush()
    except SystemExit as stop:
        return int(stop.code or 0)
    except (SparseTIRError, OSError) as error:
        return complain(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def check_files(args: argparse.Namespace) -> None:
    """Raise for files that cannot be written, before anything is measured for them."""
    for option in ("json", "markdown", "plot"):
        path = getattr(args, option, None)
        if path is None or str(path) == "-":
            continue
        if Path(path).is_dir():
            raise ArgumentError(f"--{option}: expected a file, got the folder {path}. Name a file in it.")
        if option == "plot":
            from sparsetir.workloads.plot import check_picture

            check_picture(path)


def run_table(name: str, options: Sequence[str]) -> int:
    """Measure and print one of the tables of `sparsetir.bench`: ``sparsetir bench NAME``."""
    module = importlib.import_module(f"sparsetir.bench.{name}")
    return int(module.main(options) or DONE)


def complain(error: Exception) -> int:
    """Print an error as a sentence."""
    if isinstance(error, BrokenPipeError):
        # The reader of a pipe has gone; the interpreter must not fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    print(f"sparsetir: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    return WRONG_USE


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = Parser(prog="sparsetir", description="A compiler for sparse tensor programs.", epilog=STATUS)
    top.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(title="commands", required=True, metavar="command")

    demo = command(commands, "demo", run_demo, "tune a kernel on a real matrix and compare it with other libraries")
    words = "the sparse operand (default: words in the sources of Python's standard library)"
    demo.add_argument("--matrix", metavar="FILE", help=words)
    demo.add_argument("--op", choices=OPS, default="spmm", help="the operation")
    demo.add_argument("--feat", type=positive(int), default=128, metavar="N", help="columns of the dense operands")
    demo.add_argument("--seconds", type=positive(float), default=30.0, metavar="S", help="time for the search")
    demo.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="for pictures and records")

    tune = command(commands, "tune", run_tune, "find the fastest format and schedule for a matrix or tensor")
    tune.add_argument("file", metavar="FILE", help=".mtx, .npz, .smtx or .tns, also with .gz or .xz behind it")
    tune.add_argument("--op", choices=OPS, required=True, help="the operation")
    tune.add_argument("--feat", type=positive(int), default=128, metavar="N", help="columns of the dense operands")
    presets = "quick: 24 trials in 8 seconds, standard: 64 trials, thorough: 400 trials in two minutes"
    tune.add_argument("--preset", choices=PRESETS, default="standard", help=presets)
    trials = "candidates, those in the database included (default: that of the preset)"
    tune.add_argument("--trials", type=positive(int), metavar="N", help=trials)
    limit = "end the search after this time (default: that of the preset)"
    tune.add_argument("--seconds", type=positive(float), metavar="S", help=limit)
    tune.add_argument(
        "--strategy", default="guided", help="guided, evolution, annealing, portfolio, random, exhaustive"
    )
    tune.add_argument("--amortize-over", type=positive(float), metavar="CALLS", help="that share a conversion")
    tune.add_argument("--compare-with", default="", metavar="PEERS", help="scipy,torch,mkl: time these libraries too")
    tune.add_argument("--against", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    workers = "whose workers measure: processes:N, tcp://host:port of a dask scheduler, or rpc://host:port/key"
    tune.add_argument("--executor", metavar="WHICH", help=workers)
    tune.add_argument("--machines", choices=("same", "each"), default="same", help="whether these are of one kind")
    tune.add_argument("--schedules-only", action="store_true", help="leave the format as it is")
    tune.add_argument("--seed", type=count, default=0, metavar="N", help="of the search and of the dense operands")
    tune.add_argument("--database", type=Path, metavar="FILE", help="JSON lines: trials in it are not measured again")
    tune.add_argument("--out", type=Path, metavar="DIR", help="write the report, the loops and a picture there")
    tune.add_argument("--json", metavar="OUT", help="write the result as JSON, to stdout if OUT is -")

    formats = command(commands, "formats", run_formats, "describe a pattern, and what every format makes of it")
    formats.add_argument("file", metavar="FILE", help=".mtx, .npz, .smtx or .tns, also with .gz or .xz behind it")
    formats.add_argument("--feat", type=positive(int), metavar="N", help="also time the untuned SpMM with N columns")
    most = "leave formats out that store more than X values for each entry, padding included (default: 2.5)"
    formats.add_argument("--most", type=positive(float), default=2.5, metavar="X", help=most)
    formats.add_argument("--json", metavar="OUT", help="write the result as JSON, to stdout if OUT is -")
    formats.add_argument("--plot", type=Path, metavar="PNG", help="draw the nonzeros, blocks, rows and columns")

    add_blocks(commands)

    about = "compile machine code of candidates ahead, for the searches of this machine; what is there is left alone"
    warm = command(commands, "warm", run_warm, about)
    warm.add_argument("--ops", nargs="+", default=["spmm", "spmv", "sddmm"], metavar="OP", help="spmm, spmv or sddmm")
    warm.add_argument("--dtypes", nargs="+", default=["float32"], metavar="DTYPE", help="float32 or float64")
    columns = "columns of the dense operands, which are compiled in"
    warm.add_argument("--feat", nargs="+", type=positive(int), default=[64, 128], metavar="N", help=columns)
    warm.add_argument("--processes", type=positive(int), default=2, metavar="N", help="that compile side by side")
    warm.add_argument("--list", action="store_true", help="print what there is to compile, and compile nothing")

    bench = command(commands, "bench", run_bench, "time operations in turn with other libraries")
    width = max(map(len, TABLES)) + 2
    lines = [f"  {name:{width}}{about}" for name, about in TABLES.items()]
    bench.formatter_class = VerbatimEpilog
    bench.epilog = "\n".join(["other tables, sparsetir bench NAME [--help]:", *lines, "", STATUS])
    add_bench(bench)

    about = "measure the rates of this machine, which default choices are derived from, and keep them"
    calibrate = command(commands, "calibrate", run_calibrate, about)
    calibrate.add_argument("--seconds", type=positive(float), default=20.0, metavar="S", help="time to measure for")
    calibrate.add_argument("--json", metavar="OUT", help="write the profile as JSON, to stdout if OUT is -")
    calibrate.add_argument("--plot", type=Path, metavar="PNG", help="draw the profile; needs the extra plot")

    collect = command(commands, "collect", run_collect, "measure kernels of many programs for a data set")
    add_collect(collect)

    pretrain = command(commands, "pretrain", run_pretrain, "train a cost model on the points of `sparsetir collect`")
    pretrain.add_argument("files", nargs="+", metavar="FILE", help="of JSON lines, also FILE@PROCESSOR")
    pretrain.add_argument("--out", type=Path, required=True, metavar="MODEL", help="JSON, for tune_sparse(model=)")
    pretrain.add_argument("--evaluate", action="store_true", help="print how matrices that are left out are ranked")
    pretrain.add_argument("--rounds", type=positive(int), metavar="N", help="trees (default: as the shipped model)")
    spread = "leave out points whose two measurements are farther apart (default: 0.3)"
    pretrain.add_argument("--spread", type=positive(float), metavar="SHARE", help=spread)
    pretrain.add_argument("--seed", type=count, default=0, metavar="N", help="of the shares that are left out")

    show = command(commands, "show", run_show, "print a program of the dialect, or what it is compiled to")
    show.add_argument("script", metavar="SCRIPT.py[:FUNC]", help="all programs in the file, or one")
    stages = "1 as written, 2 scheduled blocks, 3 loops, llvm, asm"
    show.add_argument("--stage", choices=("1", "2", "3", "llvm", "asm"), default="1", help=stages)

    command(commands, "info", run_info, "versions, target, cores, caches and measured bandwidth")
    return top


def add_blocks(commands: Any) -> None:
    """Add the commands for matrices larger than memory."""
    spmm = command(commands, "spmm", run_spmm, "multiply a matrix on disk, block by block, by a dense one")
    spmm.add_argument("--dense", type=Path, required=True, metavar="B.npy", help="the dense matrix or vector")
    spmm.add_argument("--out", type=Path, required=True, metavar="C.npy", help="an interrupted run is continued")
    pca = command(commands, "pca", run_pca, "principal components of a matrix on disk, block by block")
    pca.add_argument("-k", type=positive(int), default=50, metavar="N", help="components")
    arrays = "components, variances and mean, as arrays with scikit-learn's names"
    pca.add_argument("--out", type=Path, default=Path("pca.npz"), metavar="P.npz", help=arrays)
    for one in (spmm, pca):
        one.add_argument("file", metavar="FILE", help=".h5ad, .zarr, .bsp.h5 or a folder of .npy")
        one.add_argument("--name", metavar="NAME", help="of the matrix in the file: X, layers/counts")
        one.add_argument("--memory", default="2G", metavar="SIZE", help="limit of buffers, panels and results")
        one.add_argument("--quiet", action="store_true", help="no progress on stderr")


def add_collect(collect: argparse.ArgumentParser) -> None:
    """Add the options of ``sparsetir collect``."""
    collect.add_argument("file", type=Path, metavar="FILE", help="of JSON lines; the same command goes on with it")
    collect.add_argument("--matrices", type=count, default=300, metavar="N", help="generated ones, of all families")
    collect.add_argument("--programs", type=positive(int), default=5, metavar="N", help="for each matrix")
    collect.add_argument("--data", type=Path, metavar="FOLDER", help="also every matrix and tensor below it")
    which = "numbers of threads to measure: 1, 2 or 1,2"
    collect.add_argument("--threads", choices=("1", "2", "1,2"), default="1,2", metavar="N", help=which)
    mcpu = "compile for this processor, such as x86-64-v3; by default this one"
    collect.add_argument("--mcpu", metavar="NAME", help=mcpu)
    collect.add_argument("--seconds", type=positive(float), metavar="S", help="after which no further case is begun")
    collect.add_argument("--seed", type=count, default=0, metavar="N", help="of what is drawn at random")
    table = "also write the points as a table, .npz or .parquet"
    collect.add_argument("--table", type=Path, metavar="OUT", help=table)


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add the options of ``sparsetir bench``."""
    bench.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".mtx, .npz, .smtx or .tns, also .gz or .xz")
    bench.add_argument("--data", type=Path, metavar="FOLDER", help="every matrix and tensor in it")
    bench.add_argument("--suite", metavar="NAME,...", help="generated matrices and tensors; all: every family")
    bench.add_argument("--size", choices=("small", "medium", "large"), default="small", help="of the suite")
    every = "spmm:N, sddmm:N, spmv, mttkrp:N, spgemm, add, multiply, masked, topn:N, rap, triangles"
    ops = f"of {every} (default: %(default)s)"
    bench.add_argument("--ops", default="spmm:128,sddmm:128,spmv,mttkrp:32", metavar="OP:N,...", help=ops)
    bench.add_argument("--rounds", type=positive(int), default=3, metavar="N", help="turns of each library in a row")
    bench.add_argument("--rest", type=seconds, default=0.25, metavar="S", help="sleep before each turn")
    bench.add_argument("--repeat", type=count, default=2, metavar="N", help="times a disturbed row is measured again")
    bench.add_argument("--threads", type=positive(int), metavar="N", help="for every library; by default all cores")
    sweep = "also measure the best of a coarse sweep over formats and choices"
    bench.add_argument("--sweep", action="store_true", help=sweep)
    bench.add_argument("--tune", type=seconds, default=0.0, metavar="S", help="also tune so long before each row")
    database = Path("tuning-bench.jsonl")
    bench.add_argument("--database", type=Path, default=database, metavar="FILE", help="where tuning keeps trials")
    points = "measure nothing: judge decisions on points of `sparsetir collect`, .jsonl, .jsonl.xz or FILE@PROCESSOR"
    bench.add_argument("--from", type=Path, metavar="POINTS", dest="points", help=points)
    train = "with --from: also judge a model that is trained on these points of another machine"
    bench.add_argument("--train", type=Path, metavar="POINTS", help=train)
    bench.add_argument("--json", metavar="OUT", help="write everything as JSON, to stdout if OUT is -")
    bench.add_argument("--markdown", type=Path, metavar="OUT", help="write the tables as Markdown")
    bench.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows below the ceilings of the machine")


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    """Add a command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, formatter_class=WithDefaults, epilog=STATUS
    )
    parser.set_defaults(run=run)
    return parser


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        self.exit(WRONG_USE, f"{self.prog}: {message}; see {self.prog} --help\n")


class WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, where there is one and the help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if "default" in (action.help or "") or action.default in (None, False, ""):
            return action.help
        return super()._get_help_string(action)


class VerbatimEpilog(WithDefaults):
    """Keeps the lines of what stands below the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Version(argparse.Action):
    """Prints the versions that a report of a fault needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any) -> None:
        from sparsetir.utils.packages import __version__

        print(f"sparsetir {__version__} (apache-tvm {version('apache-tvm')})")
        parser.exit()


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a parser of positive numbers."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive, finite number, got {text}")
        return value

    # argparse names the type in its message.
    parse.__name__ = kind.__name__
    return parse


def seconds(text: str) -> float:
    """Parse a time, 0 for none."""
    from sparsetir.utils.arguments import parse_seconds

    return parse_seconds(text)


def count(text: str) -> int:
    """Parse a number that may be 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, got {text}")
    return value


# ---------------------------------------------------------------------------------------------------- tune


def run_tune(args: argparse.Namespace) -> int:
    """``sparsetir tune``."""
    from sparsetir.io import read
    from sparsetir.tuning import tune_sparse
    from sparsetir.utils.arguments import take_old_options
    from sparsetir.workloads.inputs import make_case

    take_old_options(args, against="compare_with")
    database = args.database or (args.out / "tuning.jsonl" if args.out else None)
    case = make_case(args.op, operand(args.file, read(args.file)), feat=args.feat, seed=args.seed)
    budget = {"max_trials": args.trials, "max_seconds": args.seconds, "amortize_over": args.amortize_over}
    budget["preset"] = args.preset
    how = {"strategy": args.strategy, "formats": [] if args.schedules_only else None, "seed": args.seed}
    how["compare_with"] = [name for name in args.compare_with.split(",") if name]
    how |= {"executor": args.executor, "machines": args.machines}
    result = tune_sparse(case.program, case.inputs, database=database, **budget, **how)
    if args.json != "-":
        print(result.report())
    if args.out:
        loops = result.kernel.script(stage=3)
        for name, text in (("report", result.report()), ("explanation", result.explain()), ("loops", loops)):
            write_text(args.out / f"{name}.txt", text + "\n", "--out", makes_folder=True)
        draw(lambda: result.plot(args.out / "tuning.png"))
    if args.json:
        write_json(args.json, facts_of(result))
    if not result.measured:
        reason = f"all {len(result.history)} trials were in {database}"
        print(f"sparsetir: {reason}: nothing was measured; a larger --trials searches on", file=sys.stderr)
    return INTERRUPTED if result.interrupted else DONE


def operand(file: str, sparse: Any) -> Any:
    """Return the contents of a file, if there is anything to tune on it."""
    shape = " x ".join(map(str, sparse.shape))
    if not sparse.nnz:
        raise ArgumentError(f"{file} is {shape} without entries: there is nothing to time")
    refuse_complex(file, sparse)
    return sparse


def refuse_complex(file: str, sparse: Any) -> None:
    """Raise if a file has numbers that no kernel computes with."""
    values = sparse.data if hasattr(sparse, "data") else sparse.values
    if values.dtype.kind == "c":
        raise ArgumentError(f"{file} holds complex numbers, and kernels compute with real ones: save the real part")


def facts_of(result: Any) -> dict[str, Any]:
    """Return the facts of a search for JSON."""
    return {
        "best": result.best.as_dict(),
        "untuned": result.untuned.as_dict(),
        "speedup": result.speedup,
        "break_even": result.break_even,
        "peers": {name: {"seconds": t, "break_even": result.break_even_with(name)} for name, t in result.peers.items()},
        "flops": result.flops,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "history": [record.as_dict() for record in result.history],
    }


def write_json(where: str, facts: dict[str, Any]) -> None:
    """Write the result as one JSON object."""
    text = json.dumps(facts, indent=1)
    if where == "-":
        print(text)
        return
    write_text(Path(where), text + "\n", "--json", makes_folder=True)


def draw(picture: Callable[[], Path]) -> None:
    """Write a picture, or say why there is none."""
    from sparsetir.bench import MissingPackageError

    try:
        print(f"wrote {picture()}")
    except MissingPackageError as error:
        print(f"no picture: {error}")


# ---------------------------------------------------------------------------------------------------- blocks


def run_spmm(args: argparse.Namespace) -> int:
    """``sparsetir spmm``."""
    import numpy as np

    from sparsetir.blocks import open_blocks

    M = open_blocks(args.file, args.name, memory=args.memory)
    try:
        B = np.load(args.dense, mmap_mode="r")
    except ValueError as error:
        raise ArgumentError(
            f"--dense: expected an array of numpy, got {args.dense}: {error}. Save it again."
        ) from error
    if not isinstance(B, np.ndarray):
        fault = f"expected a file of one array, got the archive {args.dense}"
        raise ArgumentError(f"--dense: {fault}. Save the array alone.")
    B = B[:, None] if B.ndim == 1 else B
    print(f"{M}\n{M.plan(B, out=args.out)}")
    M.spmm(B, out=args.out, progress=not args.quiet)
    print(f"wrote {args.out}")
    return DONE


def run_pca(args: argparse.Namespace) -> int:
    """``sparsetir pca``."""
    import numpy as np

    from sparsetir.blocks import open_blocks

    M = open_blocks(args.file, args.name, memory=args.memory)
    print(M)
    if args.out.suffix != ".npz" or not args.out.parent.is_dir():
        raise ArgumentError(
            f"--out: expected an .npz file in a folder that exists, got {args.out}. Choose another name."
        )
    P = M.pca(args.k, progress=not args.quiet)
    with writing_file(args.out, "--out") as partial:
        np.savez(partial, **{name: value for name, value in vars(P).items() if name.endswith("_")})
    share = P.explained_variance_ratio_
    print(f"{len(share)} components explain {share.sum():.1%} of the variance, the first {share[0]:.1%}")
    print(f"wrote {args.out}")
    return DONE


# ---------------------------------------------------------------------------------------------------- warm


def run_warm(args: argparse.Namespace) -> int:
    """``sparsetir warm``."""
    from sparsetir.tuning.warm import tasks, there, warm

    wanted = tasks(args.ops, args.dtypes, args.feat)
    if args.list:
        print("\n".join(f"{task}{', there already' if there(task) else ''}" for task in wanted))
        return DONE
    began, results = time.perf_counter(), []
    for one in warm(args.ops, args.dtypes, args.feat, processes=args.processes):
        results.append(one)
        text = one.refused or f"{one.kernels} kernels, {f'{one.seconds:.1f} s' if one.seconds else 'there already'}"
        print(f"{len(results)} of {len(wanted)}: {one.task}: {text}", file=sys.stderr)
    new = sum(one.kernels for one in results if one.seconds)
    kernels, size = sum(one.kernels for one in results), sum(one.bytes for one in results)
    took = time.perf_counter() - began
    print(f"{kernels} kernels, {size / 2**20:.1f} MiB; {new} of them compiled now, in {took:.1f} s")
    return FINDING if any(one.refused for one in results) else DONE


# ---------------------------------------------------------------------------------------------------- demo


def run_demo(args: argparse.Namespace) -> int:
    """``sparsetir demo``."""
    from sparsetir.bench import spy
    from sparsetir.script.printer import script
    from sparsetir.tuning import tune_sparse
    from sparsetir.workloads.inputs import make_case
    from sparsetir.workloads.peers import available

    name, sparse = demo_operand(args)
    case = make_case(args.op, sparse, feat=args.feat)
    heading(f"The sparse operand: {name}")
    print(facts(case.sparse))
    heading("The program (stage I)")
    print(script(case.program))
    heading(f"The search, {args.seconds:g} s")
    args.out.mkdir(parents=True, exist_ok=True)
    limits = {"max_trials": 10_000, "max_seconds": args.seconds, "compare_with": available(args.op)}
    result = tune_sparse(case.program, case.inputs, database=args.out / "tuning.jsonl", **limits)
    print(result.report())
    heading("Why this kernel")
    print(result.explain().partition("\nloops:")[0].strip())
    heading("The tuned loop nest (stage III)")
    print(shortened(result.kernel.script(stage=3)))
    heading("Time of a call")
    print("\n".join(comparison(case, result)))
    heading("Files")
    print(f"wrote {args.out / 'tuning.jsonl'}")
    if len(case.sparse.shape) == 2:
        draw(lambda: spy(case.sparse, args.out / "spy.png"))
    draw(lambda: result.plot(args.out / "tuning.png"))
    return INTERRUPTED if result.interrupted else DONE


def demo_operand(args: argparse.Namespace) -> tuple[str, Any]:
    """Return the sparse operand and what to call it."""
    from sparsetir.bench import term_document
    from sparsetir.io import read

    if args.matrix:
        return str(args.matrix), operand(args.matrix, read(args.matrix))
    if args.op == "mttkrp":
        raise ArgumentError("mttkrp takes a tensor of three dimensions: pass one with --matrix FILE.tns")
    print("reading the sources of Python's standard library", file=sys.stderr)
    return "words in the sources of Python's standard library", term_document()[0]


def heading(text: str) -> None:
    """Begin a section of the output."""
    print(f"\n== {text}\n", flush=True)


def facts(sparse: Any) -> str:
    """Size and shape of a pattern in a few lines."""
    import numpy as np

    shape = " x ".join(f"{n:,}" for n in sparse.shape)
    cells = float(np.prod([float(n) for n in sparse.shape]))
    lines = [f"{shape}, {sparse.nnz:,} nonzeros, density {sparse.nnz / cells if cells else 0.0:.3g}"]
    if len(sparse.shape) == 2 and sparse.shape[0]:
        lengths = np.diff(sparse.indptr)
        mean, spread = lengths.mean(), lengths.std()
        text = f"nonzeros in a row: {mean:.1f} on average, {lengths.max()} at most, standard deviation {spread:.1f}"
        lines.append(f"{text}; {np.count_nonzero(lengths == 0):,} rows are empty")
    return "\n".join(lines)


def shortened(text: str, most: int = LOOPS_SHOWN) -> str:
    """Return a program without the imports, and not more than `most` lines of it."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip().splitlines()
    rest = len(lines) - most
    return "\n".join(lines if rest <= 0 else [*lines[:most], f"... ({rest} more lines)"])


def comparison(case: Any, result: Any) -> list[str]:
    """Return a table of call times: the search's last comparison, and the peers interleaved with its kernel."""
    from sparsetir.bench import missing
    from sparsetir.workloads.plot import aligned

    ours = {"sparsetir, tuned": result.best.seconds, "sparsetir, untuned": result.untuned.seconds}
    if result.best == result.untuned:
        ours = {"sparsetir, untuned (nothing is clearly faster)": result.untuned.seconds}
    times = ours | result.peers
    baseline = next((times[name] for name in ("scipy", "numpy") if name in times), None)
    rows = [["", "ms", "GFLOP/s", "speedup"]]
    for name, seconds in times.items():
        speedup = f"{baseline / seconds:.2f}" if baseline else ""
        rows.append([name, f"{seconds * 1e3:.4g}", f"{result.flops / seconds / 1e9:.1f}", speedup])
    return [*aligned(rows), *(f"without {peer}: {why}" for peer, why in missing().items() if case.op != "mttkrp")]


# ---------------------------------------------------------------------------------------------------- formats


def run_formats(args: argparse.Namespace) -> int:
    """``sparsetir formats``."""
    from sparsetir.bench.formats import survey
    from sparsetir.bench.roofline import portrait
    from sparsetir.formats.pattern import pattern
    from sparsetir.io import read

    tensor = read(args.file)
    if args.feat is not None:
        refuse_complex(args.file, tensor)
    tensor_pattern = pattern(tensor)
    if args.plot:
        print(f"wrote {portrait(tensor, tensor_pattern, args.plot)}", file=sys.stderr)
    result = survey(Path(args.file).name, tensor, known=tensor_pattern, feat=args.feat, most=args.most)
    if args.json != "-":
        print(result.report())
    if args.json:
        write_json(args.json, result.as_dict())
    return FINDING if result.findings else DONE


# ---------------------------------------------------------------------------------------------------- bench


def run_bench(args: argparse.Namespace) -> int:
    """``sparsetir bench``."""
    from sparsetir.bench.measure import MeasurementPlan, parse_products
    from sparsetir.bench.report import run
    from sparsetir.workloads import inputs

    if args.points is not None:
        return run_judge(args.points, args.train)
    products = parse_products(args.ops)
    paths = [*args.files, *(inputs.find_files(args.data) if args.data else [])]
    sources = [*inputs.from_files(paths), *(inputs.from_suite(args.suite, args.size) if args.suite else [])]
    plan = MeasurementPlan(args.tune, args.database, args.rounds, args.rest, args.repeat, args.sweep)
    report = None
    try:
        for report in run(sources, products, plan, threads=args.threads):
            keep(report, args)
    finally:
        # An interrupted run shows what it has.
        if report is not None:
            show_bench(report, args)
    return FINDING if report is not None and report.findings else DONE


def run_judge(points: Path, training: Path | None) -> int:
    """Print what share of the best measured point each decision reaches."""
    from sparsetir.tuning.train import judge
    from sparsetir.workloads.plot import markdown

    for table in judge.tables(judge.read(points), judge.read(training) if training is not None else ()):
        print(markdown(table), end="\n\n")
    return DONE


def keep(report: Any, args: argparse.Namespace) -> None:
    """Write the files of a run as far as it has come."""
    if args.json and args.json != "-":
        write_json(args.json, report.as_dict())
    if args.markdown:
        write_text(args.markdown, report.markdown() + "\n", "--markdown", makes_folder=True)


def show_bench(report: Any, args: argparse.Namespace) -> None:
    """Print a run, and draw it where asked for."""
    from sparsetir.bench.roofline import draw_roofline

    if args.json == "-":
        write_json("-", report.as_dict())
    else:
        print(report.text())
    if args.plot and report.roofline is not None:
        print(f"wrote {draw_roofline(report.rows, report.roofline, args.plot)}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------- calibrate


def run_calibrate(args: argparse.Namespace) -> int:
    """``sparsetir calibrate``."""
    from sparsetir.bench.roofline import draw_profile
    from sparsetir.codegen.calibration import calibrate

    print(f"measuring for {args.seconds:g} s", file=sys.stderr)
    profile = calibrate(seconds=args.seconds)
    if args.json != "-":
        print(profile.report())
    if args.json:
        write_json(args.json, profile.as_dict())
    if args.plot:
        print(f"wrote {draw_profile(profile, args.plot)}", file=sys.stderr)
    return DONE


# ---------------------------------------------------------------------------------------------------- collect


def run_collect(args: argparse.Namespace) -> int:
    """``sparsetir collect``."""
    from sparsetir.tuning.train import dataset
    from sparsetir.tuning.train import dataset as plan
    from sparsetir.tuning.train import dataset as table
    from sparsetir.workloads.plot import aligned

    threads = tuple(int(n) for n in args.threads.split(","))
    sources = list(plan.sources(args.matrices, seed=args.seed, data=args.data))
    if not sources:
        raise ArgumentError(
            "there is nothing to measure: expected --matrices of at least 1, or --data with files below it"
        )
    how = {"programs": args.programs, "seed": args.seed, "threads": threads, "seconds": args.seconds, "mcpu": args.mcpu}
    try:
        dataset.collect(args.file, sources, **how)
    finally:
        if args.file.exists():
            print("\n".join(aligned(table.summary(args.file))))
    if args.table is not None:
        print(f"wrote {table.export(args.file, args.table)}", file=sys.stderr)
    return DONE


# --------------------------------------------------------------------------------------------------- pretrain


def run_pretrain(args: argparse.Namespace) -> int:
    """``sparsetir pretrain``."""
    from sparsetir.tuning.train import pretrain

    options = ["--out", str(args.out), "--seed", str(args.seed)]
    options += ["--evaluate"] if args.evaluate else []
    options += [] if args.rounds is None else ["--rounds", str(args.rounds)]
    options += [] if args.spread is None else ["--spread", str(args.spread)]
    return pretrain.main([*args.files, *options])


# ---------------------------------------------------------------------------------------------------- show


def run_show(args: argparse.Namespace) -> int:
    """``sparsetir show``."""
    path, name = split_script(args.script)
    for func in programs(path, name):
        print(text_of(func, args.stage))
    return DONE


def split_script(text: str) -> tuple[Path, str | None]:
    """Return the file, and the function if one is named."""
    file, colon, name = text.rpartition(":")
    return (Path(file), name) if colon and name.isidentifier() else (Path(text), None)


def programs(path: Path, name: str | None) -> list[Any]:
    """Return the programs that a script defines, or the one called `name`."""
    from tvm import ir, tirx

    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; expected SCRIPT.py or SCRIPT.py:FUNC")
    if not path.is_file():
        raise ArgumentError(f"there is no script {path}; expected SCRIPT.py or SCRIPT.py:FUNC")
    if path.suffix != ".py":
        hint = "sparsetir formats shows a matrix or tensor"
        raise ArgumentError(f"{path} is no Python script; expected SCRIPT.py or SCRIPT.py:FUNC; {hint}")
    functions = {n: v for n, v in loaded(path).items() if isinstance(v, (tirx.PrimFunc, ir.IRModule)) and n[0] != "_"}
    if name is not None and name not in functions:
        raise ArgumentError(f"{path} defines no program {name!r}; it defines {', '.join(functions) or 'none'}")
    if not functions:
        raise ArgumentError(f"{path} defines no program: expected a function with @T.prim_func at its top level")
    return [functions[name]] if name is not None else list(functions.values())


def loaded(path: Path) -> dict[str, Any]:
    """Return the names that a script defines."""
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        return runpy.run_path(str(path), run_name="__sparsetir_show__")
    except SparseTIRError:
        raise
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)


def text_of(func: Any, stage: str) -> str:
    """Return the text of a program at a stage."""
    from sparsetir.build import build
    from sparsetir.script.printer import script

    if stage == "1":
        return script(func)
    kernel = build(func)
    if stage in "23":
        return kernel.script(stage=int(stage))
    return kernel.source("ll" if stage == "llvm" else stage)


# ---------------------------------------------------------------------------------------------------- info


def run_info(_args: argparse.Namespace) -> int:
    """``sparsetir info``."""
    from sparsetir.bench.roofline import levels
    from sparsetir.codegen.cache import cache_folder
    from sparsetir.codegen.calibration import family_profile, read_profile
    from sparsetir.codegen.target import describe_target, native_target
    from sparsetir.intrin import available
    from sparsetir.utils.machine import machine_name
    from sparsetir.utils.packages import __version__
    from sparsetir.utils.threads import get_num_threads

    rows = [("sparsetir", __version__), ("python", platform.python_version())]
    rows += [(package, version(package)) for package in PACKAGES]
    rows += [("machine", machine_name()), *describe_target(), ("target", str(native_target()))]
    units = [f"{unit.name} ({unit.instruction})" for unit in available(native_target())]
    rows.append(("matrix units", ", ".join(units) or "none"))
    rows.append(("threads", str(get_num_threads())))
    profile = read_profile() or family_profile()
    rows.append(("profile", f"{profile.name}: {profile.origin}"))
    folder = cache_folder()
    kept = len(list(folder.glob("*.so"))) if folder and folder.exists() else 0
    rows.append(("kernel cache", f"{folder}, {kept} kernels" if folder else "switched off"))
    sizes = [f"{name} {cache.size}" for name, cache in sorted(process_caches().items())]
    rows.append(("process caches", ", ".join(sizes)))
    rows += [(f"{c.name} cache", f"{c.size >> 10} KiB{bandwidth(c.size // 2)}") for c in levels()]
    rows.append(("memory", f"256 MiB copied{bandwidth(256 << 20)}"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {text}" for name, text in rows))
    return DONE


def process_caches() -> dict[str, Any]:
    """Return the bounded caches of a process by their names, which the modules with public functions make."""
    from sparsetir.utils.caches import CACHES

    for module in ("codegen.cache", "einsum.products", "lazy.run"):
        importlib.import_module(f"sparsetir.{module}")
    return CACHES


def bandwidth(size: int) -> str:
    """Measure how fast one core copies within `size` bytes; None where the call itself would take most of the time."""
    return f", {copy_bandwidth(size) / 1e9:.1f} GB/s read and written by one core" if size >= SMALLEST_COPY else ""


def version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def copy_bandwidth(size: int, *, seconds: float = 0.1) -> float:
    """Bytes read and written per second by copying within `size` bytes."""
    import numpy as np

    source, target = np.ones(size // 2, np.uint8), np.ones(size // 2, np.uint8)
    repeats = max(1, REPEATED_BYTES // size)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(repeats):
            np.copyto(target, source)
        best = min(best, (time.perf_counter() - start) / repeats)
    return 2 * source.nbytes / best


if __name__ == "__main__":
    raise SystemExit(main())
