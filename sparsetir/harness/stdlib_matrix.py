# SPDX-License-Identifier: Apache-2.0
"""A real sparse matrix that every machine with Python has: which word stands in which library source."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from sparsetir.errors import FileFormatError

WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
NOT_STDLIB = {"site-packages", "dist-packages"}


def source_files(root: Path) -> list[Path]:
    """The Python sources below `root` without installed packages, in an order that no file system changes."""
    found = (path for path in root.rglob("*.py") if NOT_STDLIB.isdisjoint(path.relative_to(root).parts))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


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
    folder = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    files = source_files(folder)
    if not files:
        raise FileFormatError(f"expected Python sources (*.py) in {folder}, found none; try another folder")
    counts = [Counter(WORD.findall(path.read_bytes())) for path in files]
    terms = sorted(set(chain.from_iterable(counts)))
    documents = [path.relative_to(folder).as_posix() for path in files]
    return assemble(counts, terms), documents, [term.decode("ascii") for term in terms]


def assemble(counts: list[Counter[bytes]], terms: list[bytes]) -> sp.csr_array:
    """The matrix of ``log(1 + count)``, one row for each counter."""
    column = {term: j for j, term in enumerate(terms)}
    lengths = np.fromiter(map(len, counts), np.int32, len(counts))
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    nnz = int(indptr[-1])
    indices = np.fromiter((column[term] for count in counts for term in count), np.int32, nnz)
    occurrences = np.fromiter(chain.from_iterable(count.values() for count in counts), np.float32, nnz)
    matrix = sp.csr_array((np.log1p(occurrences), indices, indptr), shape=(len(counts), len(terms)))
    matrix.sort_indices()
    return matrix
