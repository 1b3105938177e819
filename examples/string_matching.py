# SPDX-License-Identifier: Apache-2.0
"""Which identifiers of Python's standard library are nearly the same: the largest entries of each row of A @ A.T.

A row of A is a word, a column three letters that follow each other, a value how much they tell of the word (TF-IDF),
and each row has length one. A @ A.T then has the similarity of every two words; of each row only the ten largest above
0.8 are kept, and the others are never stored. ``--words 50000`` takes more words.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from sparsetir.bench import MissingPackageError, interleave, spy

try:
    from sparse_dot_topn import sp_matmul_topn
except ImportError:
    sp_matmul_topn = None

TOP, THRESHOLD, LETTERS = 10, 0.8, 3
SHOWN, PICTURE = 12, "string_matching.png"


def identifiers(count: int) -> list[str]:
    """Words of six letters or more in the modules of the standard library, in order."""
    found: dict[str, str] = {}  # one spelling of each
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found |= {word.lower(): word for word in re.findall(r"[A-Za-z_]\w{5,}", path.read_text(encoding="utf-8"))}
    every = [word for _, word in sorted(found.items())]
    return every[:: max(1, len(every) // count)][:count]


def trigrams(words: list[str]) -> sp.csr_array:
    """How much three letters tell of a word: occurrences times inverse document frequency, rows of length one."""
    padded = [f"^{word.lower()}$" for word in words]
    parts = [[word[n : n + LETTERS] for n in range(len(word) - LETTERS + 1)] for word in padded]
    rows = np.repeat(np.arange(len(words)), [len(part) for part in parts])
    terms, columns = np.unique(np.concatenate(parts), return_inverse=True)
    counts = sp.csr_array((np.ones(rows.size), (rows, columns)), shape=(len(words), terms.size))  # repeated ones add up
    inverse = np.log((1 + len(words)) / (1 + np.bincount(counts.indices, minlength=terms.size))) + 1
    weights = counts @ sp.diags_array(inverse)
    lengths = np.sqrt(weights.multiply(weights).sum(axis=1))
    return sp.csr_array(sp.diags_array(1 / lengths) @ weights, dtype=np.float32)


def by_scipy(A: sp.csr_array, B: sp.csr_array) -> sp.csr_array:
    """Compute the whole product, then keep the entries above the threshold."""
    C = (A @ B).tocoo()
    keep = C.data > THRESHOLD
    rows, columns, values = C.row[keep], C.col[keep], C.data[keep]
    order = np.lexsort((-values, rows))
    first = np.searchsorted(rows[order], np.arange(A.shape[0]))
    order = order[np.arange(order.size) - first[rows[order]] < TOP]
    return sp.csr_array((values[order], (rows[order], columns[order])), shape=C.shape)


def table(words: list[str], C: sp.csr_array) -> str:
    """Words with most that are like them."""
    lines = []
    for row in np.argsort(-np.diff(C.indptr), kind="stable")[:SHOWN]:
        part = slice(C.indptr[row], C.indptr[row + 1])
        like = sorted(zip(-C.data[part], C.indices[part], strict=True))
        others = [f"{words[column]} {-score:.2f}" for score, column in like if column != row]
        lines.append(f"{words[row]:28} {', '.join(others[:3])}")
    return "\n".join(lines)


def contenders(A: sp.csr_array, B: sp.csr_array) -> dict[str, Callable[[], Any]]:
    """Return three ways to compute the same result."""
    calls = {
        "sparsetir": lambda: sparsetir.matmul(A, B, top=TOP, threshold=THRESHOLD),
        "scipy": lambda: by_scipy(A, B),
    }
    if sp_matmul_topn is not None:
        left, right, threads = sp.csr_matrix(A), sp.csr_matrix(B), sparsetir.get_num_threads()
        calls["sparse_dot_topn"] = lambda: sp_matmul_topn(left, right, TOP, threshold=THRESHOLD, n_threads=threads)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=5000, help="how many (default: 5000)")
    words = identifiers(parser.parse_args().words)
    A = trigrams(words)
    B = sp.csr_array(A.T)

    C = sparsetir.matmul(A, B, top=TOP, threshold=THRESHOLD)
    expected = by_scipy(A, B)
    # Which ones of equal similarities are kept is not said, and rounding decides about those at the limit itself.
    clear = [M.multiply(M > THRESHOLD + 1e-5).sum(axis=1) for M in (C, expected)]
    np.testing.assert_allclose(*clear, rtol=1e-5)

    print(f"{len(words):,} words, {A.shape[1]:,} trigrams; pairs above {THRESHOLD}: {C.nnz - len(words):,}\n")
    print(table(words, C), "\n")
    _, _, loops = sparsetir.build(sparsetir.ops.spgemm()).script(stage=2).partition("_values(")
    print(f"The loops that multiply rows, where the pattern is known:\n{loops.partition(chr(10))[2]}\n")
    for name, timing in interleave(contenders(A, B), rounds=2, rest=0.1).items():
        print(f"{name:16} {timing.median * 1e3:9.2f} ms")
    try:
        print(f"\nwrote {spy(C, PICTURE)}")
    except MissingPackageError as error:
        print(f"\nno picture: {error}")


if __name__ == "__main__":
    main()
