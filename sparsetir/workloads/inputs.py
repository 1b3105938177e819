# SPDX-License-Identifier: Apache-2.0
"""Matrices, tensors and operands to measure: files, the suite, the standard library."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir import ops
from sparsetir.errors import ArgumentError, FileFormatError, SparseTIRError
from sparsetir.interop import CooTensor, is_sparse
from sparsetir.io import READERS, UNPACKERS, read
from sparsetir.ir.views import decode
from sparsetir.utils.arguments import as_path, shown
from sparsetir.utils.buffers import aligned
from sparsetir.workloads import suite

# A real sparse matrix that every machine with Python has: which word stands in which library source.


WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
NOT_STDLIB = {"site-packages", "dist-packages"}


def source_files(root: Path) -> list[Path]:
    """Return the Python sources below `root` without installed packages, in an order that no file system changes."""
    files = (path for path in root.rglob("*.py") if NOT_STDLIB.isdisjoint(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def term_document(root: Path | None = None) -> tuple[sp.csr_array, list[str], list[str]]:
    """Build the term-document matrix of a folder of Python sources.

    Words follow Zipf's law: a few columns are nearly dense, most hold one or two nonzeros, and row lengths
    differ a thousandfold. With the default folder it has some 10**5 to 10**6 nonzeros and takes a few seconds.

    Parameters
    ----------
    root : Path, optional
        Folder to read; by default the running Python's standard library.

    Returns
    -------
    matrix : scipy.sparse.csr_array, shape (documents, terms), float32, int32 indices
        ``log(1 + number of occurrences)``; indices sorted within each row.
    documents : list of str
        Paths relative to `root`, sorted; one for each row.
    terms : list of str
        Identifiers, keywords and words of comments, sorted; one for each column.

    Raises
    ------
    FileFormatError
        If the folder holds no Python source.

    Examples
    --------
    >>> matrix, documents, terms = term_document(Path(sysconfig.get_path("stdlib")) / "json")
    >>> documents[0], matrix.shape == (len(documents), len(terms))
    ('__init__.py', True)
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else as_path(root, "root", "the path of a folder")
    files = source_files(folder)
    if not files:
        raise FileFormatError(f"expected Python sources (*.py) in {folder}, got none; try another folder")
    counts = [Counter(WORD.findall(path.read_bytes())) for path in files]
    terms = sorted(set(chain.from_iterable(counts)))
    documents = [path.relative_to(folder).as_posix() for path in files]
    return assemble(counts, terms), documents, [term.decode("ascii") for term in terms]


def assemble(counts: list[Counter[bytes]], terms: list[bytes]) -> sp.csr_array:
    """Return the matrix of ``log(1 + count)``, one row for each counter."""
    column = {term: j for j, term in enumerate(terms)}
    lengths = np.fromiter(map(len, counts), np.int32, len(counts))
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    nnz = int(indptr[-1])
    indices = np.fromiter((column[term] for count in counts for term in count), np.int32, nnz)
    occurrences = np.fromiter(chain.from_iterable(count.values() for count in counts), np.float32, nnz)
    matrix = sp.csr_array((np.log1p(occurrences), indices, indptr), shape=(len(counts), len(terms)))
    matrix.sort_indices()
    return matrix


# What is measured: matrices and tensors in files or from the suite, loaded one at a time.


@dataclass(frozen=True)
class InputSource:
    """A matrix or tensor that is not in memory yet.

    Parameters
    ----------
    name : str
        What it is called in tables.
    load : callable
        Gives a scipy.sparse array or a CooTensor.
    """

    name: str
    load: Callable[[], Any]


def find_files(folder: Path) -> list[Path]:
    """Return every file below `folder` whose extension `sparsetir.read` knows."""
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {folder}")
    return sorted(path for path in folder.rglob("*") if path.is_file() and extension(path) in READERS)


def extension(path: Path) -> str:
    """Return the suffix of a path without the suffix of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in UNPACKERS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def from_files(paths: Sequence[Path]) -> list[InputSource]:
    """Return a source for each file; that they are there is checked now, before a long run."""
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"there is no file {missing[0]}")
    return [InputSource(path.name.partition(".")[0], partial(read, path)) for path in paths]


def from_suite(names: str, size: str) -> list[InputSource]:
    """Return a source for each family of generated inputs: ``"all"``, or names separated by commas."""
    entries = suite.families() | suite.tensors()
    selected = list(entries) if names == "all" else [name.strip() for name in names.split(",")]
    unknown = [name for name in selected if name not in entries]
    if unknown:
        raise ArgumentError(f"the suite has all, {', '.join(entries)}, got {unknown[0]!r}")
    return [InputSource(name, partial(entries[name], size)) for name in selected]


def loaded(sources: Sequence[InputSource]) -> Iterator[tuple[str, Any]]:
    """Name and contents of each source, one after the other; files that cannot be read are named on stderr."""
    for source in sources:
        try:
            value = source.load()
        except FileFormatError as error:
            say(f"skipped: {error}")
            continue
        yield source.name, value
        del value  # before the next one is loaded


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """Return an error as one line."""
    if isinstance(error, SparseTIRError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def free_memory() -> float:
    """Return the bytes available without swapping; infinite where the system does not report them."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(facts["MemAvailable"].split()[0]) * 1024


# A ready program with a sparse operand from outside and random dense ones.


DTYPE = "float32"
MOST_32_BITS = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """An operation on data.

    Parameters
    ----------
    op : str
        One of `DENSE`.
    program : PrimFunc
        Of `sparsetir.ops`.
    inputs : dict of str to array
        The arguments of a call.
    """

    op: str
    program: tirx.PrimFunc
    inputs: dict[str, Any]

    @property
    def sparse(self) -> Any:
        """The sparse argument."""
        return next(iter(self.inputs.values()))


# The dense operands of each operation: which dimensions of the sparse one they share, and whether they have columns.
DENSE: dict[str, dict[str, tuple[int, bool]]] = {
    "spmm": {"B": (1, True)},
    "spmv": {"x": (1, False)},
    "sddmm": {"X": (0, True), "Y": (1, True)},
    "mttkrp": {"B": (1, True), "C": (2, True)},
}


def dense_shapes(inputs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the dense arguments."""
    return [np.shape(value) for value in inputs.values() if not is_sparse(value)]


def make_case(op: str, sparse: Any, *, feat: int = 128, seed: int = 0) -> Case:
    """Put random dense operands to a sparse one.

    Parameters
    ----------
    op : {"spmm", "spmv", "sddmm", "mttkrp"}
    sparse : scipy.sparse array or CooTensor
        A matrix, for mttkrp a tensor of three dimensions; taken as float32.
    feat : int
        Number of columns of the dense operands; spmv has none.
    seed : int
        Of the dense operands, which are normally distributed and begin at a cache line.

    Raises
    ------
    ArgumentError
        `op` is not known, or takes something of another number of dimensions.
    """
    if op not in DENSE:
        raise ArgumentError(f"expected one of the operations {', '.join(DENSE)}, got {shown(op)}")
    if seed < 0:
        raise ArgumentError(f"seed: expected a non-negative integer, got {seed}")
    if feat < 1:
        raise ArgumentError(f"feat: expected a positive number of columns, got {feat}")
    rank, shape = (3 if op == "mttkrp" else 2), tuple(sparse.shape)
    if len(shape) != rank:
        sizes = " x ".join(map(str, shape))
        alternative = "spmm" if len(shape) == 2 else "mttkrp" if len(shape) == 3 else "another file"
        raise ArgumentError(f"{op} takes a sparse operand of {rank} dimensions, got {sizes}; try {alternative}")
    needed = 4 * sum(shape[dim] * (feat if has_columns else 1) for dim, has_columns in DENSE[op].values())
    if needed > free_memory():
        fault = f"expected dense operands within the free memory, got {feat} columns, which need {needed / 1e9:.3g} GB"
        raise ArgumentError(f"feat: {fault}. Choose fewer.")
    idtype = "int32" if max(sparse.nnz, *shape) <= MOST_32_BITS else "int64"
    program = getattr(ops, op)(DTYPE, idtype=idtype)
    name = next(buffer.name for buffer in decode(program).buffers.values() if not buffer.is_dense)
    rng = np.random.default_rng(seed)
    inputs = {name: as_float32(sparse)}
    for dense, (dim, has_columns) in DENSE[op].items():
        size = (shape[dim], feat) if has_columns else (shape[dim],)
        inputs[dense] = aligned(rng.standard_normal(size, np.float32))
    return Case(op, program, inputs)


def as_float32(sparse: Any) -> Any:
    """Return the entries with values of the programs' dtype; a matrix as CSR with sorted rows."""
    if isinstance(sparse, CooTensor):
        return sparse.with_values(sparse.values.astype(DTYPE))
    matrix = sp.csr_array(sparse, dtype=DTYPE)
    if not matrix.has_canonical_format:
        matrix.sum_duplicates()
    return matrix


__all__ = ["InputSource", "find_files", "free_memory", "from_files", "from_suite", "loaded", "reason", "say"]
