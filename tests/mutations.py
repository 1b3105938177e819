# SPDX-License-Identifier: Apache-2.0
"""Mutation check: seed faults in the source, one at a time, and report the share that the tests find.

``python -m tests.mutations`` copies the packages and the tests to a temporary folder, makes one small edit there, and
runs the test files that cover the edited module until the first failure. ``--control`` seeds no fault, to see that the
tests pass in the copy.
``--turn N`` runs what ``make test TURN=N`` runs of them, to see what the sample loses.
``--tests-of COMMIT`` takes the tests of another commit, to compare two states of the suite on the same faults.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAPPED = ("schedules", "tuning")  # packages at the top level that are installed below sparsetir
IGNORED = shutil.ignore_patterns("__pycache__", ".hypothesis")
FOUND, MISSED, UNUSABLE = "found", "missed", "unusable"
TESTS_FAILED, INTERRUPTED = 1, 2  # exit codes of pytest; an error while collecting interrupts


@dataclass(frozen=True)
class Fault:
    """An edit of one place in a source file, and the tests that should find it.

    Parameters
    ----------
    path : str
    old, new : str
        Text that occurs once in the file, and what replaces it.
    tests : sequence of str
        Files or folders below ``tests``.
    """

    path: str
    old: str
    new: str
    tests: Sequence[str]

    def __str__(self) -> str:
        return f"{self.path}: {self.old.strip()!r} -> {self.new.strip()!r}"

    def apply(self, root: Path) -> None:
        """Edit the file below `root`; raise ValueError unless the text occurs exactly once."""
        path = root / self.path
        source = path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{self}: expected one occurrence, got {source.count(self.old)}. Update the fault.")
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


LOOPS = "sparsetir/lower/vector/loop_transforms.py"
ROWS = "sparsetir/lower/rows/partition.py"
INDEPENDENCE = "sparsetir/lower/analysis/independence.py"
MERGES = "sparsetir/lower/target/merge_loops.py"
PLANS = "sparsetir/runtime/call_plan.py"
STRUCTURE = "sparsetir/runtime/validation.py"
COMPRESSED = "sparsetir/formats/compressed.py"
GRADIENTS = "sparsetir/relax/gradients.py"
DECOMPOSE = "sparsetir/transform/decompose.py"
REGISTERS = "sparsetir/lower/vector/registers.py"
SCRATCH = "sparsetir/lower/target/scratch.py"
SEARCH = "sparsetir/lower/target/search.py"
SELECTION = "sparsetir/sparse_output/selection.py"
RESULT = "sparsetir/sparse_output/result.py"
HYBRID = "sparsetir/formats/hybrid.py"
PLANNING = "sparsetir/einsum/planning.py"
TORCH = "sparsetir/torch/functions.py"
BLOCKS = "sparsetir/blocks/reading.py"

OF_LOOPS = ("lower/test_fibers.py", "lower/test_passes.py")
OF_ROWS = ("lower/test_carry.py", "lower/test_partitions.py")
OF_STEPS = ("lower/test_independence.py",)
OF_MERGES = ("transform/test_coiterate_loops.py", "transform/test_coiterate.py")
OF_PLANS = ("runtime/test_kernels.py", "runtime/test_histories.py")
OF_STRUCTURE = ("runtime/test_validation.py",)
OF_FORMATS = ("formats/test_formats.py", "formats/test_properties.py")
OF_GRADIENTS = ("relax/test_relax_gradients.py",)
OF_SEARCH = ("lower/test_lookups.py", "lower/test_passes.py")
OF_SELECTION = ("sparse_output/test_products.py",)
OF_EINSUM = ("einsum/test_notation.py", "einsum/test_reductions.py")
OF_TORCH = ("torch/test_torch_graph.py", "torch/test_torch_products.py")
OF_BLOCKS = ("blocks/test_blocks.py", "blocks/test_chunks.py")
OF_PIECES = ("transform/test_decompose.py", "transform/test_decompose_rules.py", "transform/test_decompose_numbers.py")

FAULTS = (
    # Passes
    Fault(LOOPS, "return lane if is_number(gap, 0) else None", "return lane", OF_LOOPS),
    Fault(LOOPS, "    if _lane(tiles, store) is None:\n", "    if False:\n", OF_LOOPS),
    Fault(LOOPS, "len(loads) == 1 else None", "len(loads) >= 1 else None", OF_LOOPS),
    Fault(ROWS, "combiner is tirx.Max else tirx.max_value", "combiner is tirx.Min else tirx.max_value", OF_ROWS),
    Fault(ROWS, "cast(start - begin, str(entry.ty.dtype)) + entry}", "entry}", OF_ROWS),
    Fault(INDEPENDENCE, "buffer not in self.walk.inside and not self._are_apart(sites)", "False", OF_STEPS),
    Fault(INDEPENDENCE, "analyzer.can_prove(offset >= const(0, WIDE))", "True", OF_STEPS),
    Fault(INDEPENDENCE, "if any(f is None for f in fibers)", "if all(f is None for f in fibers)", OF_STEPS),
    Fault(
        INDEPENDENCE, "isinstance(guard, tirx.LT) and bool", "isinstance(guard, (tirx.LT, tirx.LE)) and bool", OF_STEPS
    ),
    Fault(MERGES, "bool(self.kind & 2)", "bool(self.kind & 1)", OF_MERGES),
    # Decomposition
    Fault(DECOMPOSE, "all(piece.rule.partitions_rows and", "any(piece.rule.partitions_rows and", OF_PIECES),
    Fault(
        DECOMPOSE,
        "body = tirx.IfThenElse(conjunction(inside), body, None) if inside else body",
        "inside = []",
        OF_PIECES,
    ),
    Fault(DECOMPOSE, "replace(rule, partitions_rows=False) if is_bare", "rule if is_bare", OF_PIECES),
    # Formats
    Fault(COMPRESSED, "if m <= 4 * entries.nnz:", "if m > 4 * entries.nnz:", OF_FORMATS),
    Fault(COMPRESSED, "begins(np.bincount(columns, minlength=n))", "begins(np.bincount(columns))", OF_FORMATS),
    Fault(COMPRESSED, "source.major != 1 or source.block", "source.block", OF_FORMATS),
    # Call plans
    Fault(PLANS, "value.shape != shape or value.dtype is not dtype", "value.shape != shape", OF_PLANS),
    Fault(PLANS, "value.dtype is not dtype or not value.flags.carray", "value.dtype is not dtype", OF_PLANS),
    Fault(PLANS, "indptr[-1] != len(indices) or len(data)", "len(data)", OF_PLANS),
    Fault(PLANS, "expected is not array and not np.array_equal(expected, array)", "False", OF_PLANS),
    Fault(PLANS, "any(np.may_share_memory(ready[at], array) for array in inputs)", "False", OF_PLANS),
    Fault(PLANS, "    if not covered:\n        return np.zeros\n", "", OF_PLANS),
    # Structure checks
    Fault(STRUCTURE, "now < before if order", "now <= before if order", OF_STRUCTURE),
    Fault(STRUCTURE, "indptr[0] != 0 or indptr[-1] != size", "indptr[-1] != size", OF_STRUCTURE),
    Fault(STRUCTURE, "if faults or not 0 <= largest < limit:", "if faults or not 0 <= largest <= limit:", OF_STRUCTURE),
    # Gradients
    Fault(
        GRADIENTS,
        'calls.spmm(*b.matrix_transposed(b["data"]), b.g)',
        "calls.spmm(*b.matrix_transposed(b.ones()), b.g)",
        OF_GRADIENTS,
    ),
    Fault(GRADIENTS, '"X": calls.spmm(weights, *b.csr', '"X": calls.spmm(b.g, *b.csr', OF_GRADIENTS),
    Fault(GRADIENTS, "op.subtract(weighted,", "op.add(weighted,", OF_GRADIENTS),
    Fault(GRADIENTS, "b.emit(op.divide(b.g, counts))", "b.g", OF_GRADIENTS),
    Fault(GRADIENTS, "b.emit(op.divide(b.g, count))", "b.g", OF_GRADIENTS),
    Fault(GRADIENTS, 'b.taken(b["kinds"], order)', 'b["kinds"]', OF_GRADIENTS),
    Fault(TORCH, "graph.rows.share(x.dtype) if is_mean else None", "None", OF_TORCH),
    Fault(TORCH, "torch.ops.aten.threshold_backward(g.contiguous(), y.detach(), 0)", "g.contiguous()", OF_TORCH),
    Fault(
        TORCH,
        'SpMM.apply(graph, inner, share is not None, "", weight, gradient',
        'SpMM.apply(graph, inner, False, "", weight, gradient',
        OF_TORCH,
    ),
    # Registers, scratch and searches
    Fault(REGISTERS, "guards = [*_any_runs(sites), *first.guards]", "guards = first.guards", OF_LOOPS),
    Fault(REGISTERS, "if not sites or not _agree(sites, loop) or not", "if not sites or not", OF_LOOPS),
    Fault(REGISTERS, "agree = all_same(indices, list(site.store.indices)) and", "agree =", OF_LOOPS),
    Fault(SCRATCH, "limited = tirx.Min(least, most)", "limited = size", OF_LOOPS),
    Fault(SCRATCH, "return most + 1 if least >= 0 and", "return most + 1 if", OF_LOOPS),
    Fault(
        SEARCH,
        "binary_search(lambda mid: value(mid) < coord, lo, hi)",
        "binary_search(lambda mid: value(mid) <= coord, lo, hi)",
        OF_SEARCH,
    ),
    Fault(
        SEARCH,
        "going = tirx.And(get(at) < count, get(search.cell)",
        "going = tirx.And(get(at) <= count, get(search.cell)",
        OF_SEARCH,
    ),
    Fault(SEARCH, "start(mid + one) <= pos, lo", "start(mid + one) < pos, lo", OF_SEARCH),
    # Computed patterns
    Fault(SELECTION, "tirx.Or(here > least, is_tie)", "here > least", OF_SELECTION),
    Fault(
        SELECTION,
        "self.value(get(self.out.pos) + self.step) >= self.least",
        "self.value(get(self.out.pos) + self.step) > self.least",
        OF_SELECTION,
    ),
    Fault(RESULT, "max(*pattern.shape, len(pattern.keys)) <= LARGEST_INT32", "True", OF_SELECTION),
    # Formats of several pieces, index notation, blocks
    Fault(
        HYBRID, "lengths >= self.density * entries.shape[1], lengths", "lengths > entries.shape[1], lengths", OF_FORMATS
    ),
    Fault(PLANNING, "return alone or (absorbed and constant)", "return alone or absorbed", OF_EINSUM),
    Fault(PLANNING, "kind.layout is None or len(set(term)) < len(term)", "kind.layout is None", OF_EINSUM),
    Fault(BLOCKS, "np.int32 if store.lines[1] < 1 << 31 else np.int64", "np.int32", OF_BLOCKS),
    Fault(
        BLOCKS,
        "worst = int(stored.min()) if stored.min() < 0 else int(stored.max())",
        "worst = int(stored.max())",
        OF_BLOCKS,
    ),
)


def copy_to(root: Path, tests_of: str | None = None) -> None:
    """Copy the packages, laid out as they are installed, and the tests, of a commit if one is named."""
    shutil.copytree(ROOT / "sparsetir", root / "sparsetir", ignore=IGNORED)
    for name in MAPPED:
        shutil.copytree(ROOT / name, root / "sparsetir" / name, ignore=IGNORED)
    shutil.copy(ROOT / "pyproject.toml", root)
    if tests_of is None:
        shutil.copytree(ROOT / "tests", root / "tests", ignore=IGNORED)
        return
    archive = subprocess.run(["git", "archive", tests_of, "tests"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True)


@contextmanager
def mutated(fault: Fault | None, tests_of: str | None = None) -> Iterator[Path]:
    """Make a temporary copy with a fault, or without one."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_to(root, tests_of)
        if fault is not None:
            fault.apply(root)
        yield root


def outcome(tests: Sequence[str], root: Path, turn: int | None = None) -> str:
    """Run tests in a copy until one fails, or what `make test` runs of them; report whether one did."""
    paths = [f"tests/{path}" for path in tests]
    flags = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    flags += [] if turn is None else [f"--turn={turn}"]
    environment = {**os.environ, "TVM_NUM_THREADS": "2", "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *paths], cwd=root, env=environment, capture_output=True, text=True
    )
    if run.returncode < 0:  # a signal ended the process
        return FOUND
    if run.returncode not in (0, TESTS_FAILED, INTERRUPTED):
        return f"{UNUSABLE}: {(run.stdout + run.stderr)[-300:]}"
    return FOUND if run.returncode else MISSED


def main(argv: Sequence[str] | None = None) -> int:
    """Check faults from the command line; exit with 1 if the tests miss one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check one fault in N")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin with fault K")
    parser.add_argument("--only", default="", metavar="TEXT", help="check the faults whose path contains TEXT")
    parser.add_argument("--tests-of", metavar="COMMIT", help="take the tests of this commit")
    parser.add_argument("--control", action="store_true", help="seed no fault: each outcome must be 'missed'")
    parser.add_argument("--turn", type=int, metavar="N", help="run what `make test TURN=N` runs of the tests")
    args = parser.parse_args(argv)
    faults = [fault for fault in FAULTS[args.first :: args.every] if args.only in fault.path]
    if args.control:  # each group of tests once
        faults = list({fault.tests: fault for fault in faults}.values())
    outcomes = []
    for fault in faults:
        began = time.perf_counter()
        with mutated(None if args.control else fault, args.tests_of) as root:
            outcomes.append(outcome(fault.tests, root, args.turn))
        print(f"{outcomes[-1]:7} {time.perf_counter() - began:5.0f} s  {fault}", flush=True)
    print(f"{outcomes.count(FOUND)} of {len(faults)} faults found")
    return int(outcomes.count(FOUND) < len(faults))


if __name__ == "__main__":
    sys.exit(main())
