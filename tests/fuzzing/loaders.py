# SPDX-License-Identifier: Apache-2.0
"""Mutated files of every kind and packing.

Reading one is wrong when it takes too much memory, the error is none of the package's, or what was read is not sound.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse as sp

GROWTH = 1 << 30  # bytes that a case may take
PACKINGS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
SIZES = (127, 255, 2**16, 2**31 - 1, 2**31, 2**32, 10**12, 2**63 - 1)
NUMBERS = ["0", "-1", "1", "2", "3", *map(str, SIZES), "1e400", "-0", "nan"]
DTYPES = ("int8", "int64", "uint64", "float16", "float64", "complex64", "bool", "S3", "U2", "V4", "datetime64[s]")


# ---------------------------------------------------------------------------------------------- files


def matrix(rng: random.Random) -> Any:
    """A small matrix, some without rows, columns or entries."""
    shape = rng.choice([(0, 3), (3, 0), (1, 1), (2, 3), (6, 4), (9, 9)])
    seed = np.random.default_rng(rng.randrange(1 << 30))
    return sp.random_array(shape, density=rng.choice([0, 0.3, 1]), format="csr", rng=seed)


def mtx(rng: random.Random) -> bytes:
    stream, found = io.BytesIO(), matrix(rng)
    field = rng.choice(["real", "integer", "complex", "pattern"])
    held = rng.choice([found.tocoo(), found.toarray()])
    if rng.random() < 0.3:
        held = sp.coo_array(np.eye(4) + np.eye(4, k=1) + np.eye(4, k=-1))
    scipy.io.mmwrite(stream, held, field=field if sp.issparse(held) else None, comment=rng.choice(["", "note"]))
    return stream.getvalue()


def smtx(rng: random.Random) -> bytes:
    found = matrix(rng)
    head = ", ".join(map(str, (*found.shape, found.nnz)))
    return "\n".join([head, *(" ".join(map(str, array)) for array in (found.indptr, found.indices))]).encode()


def tns(rng: random.Random) -> bytes:
    order = rng.randrange(1, 5)
    lines = ["# entries"]
    for _ in range(rng.randrange(8)):
        coords = [str(rng.randrange(1, 6)) for _ in range(order)]
        lines.append(" ".join([*coords, f"{rng.uniform(-2, 2):.3g}"]))
    return "\n".join(lines).encode()


def npz(rng: random.Random) -> bytes:
    """Arrays of a matrix or a tensor, some of another type, shape or value, written with or without compression."""
    stream = io.BytesIO()
    if rng.random() < 0.3:
        arrays = {"coords": np.array([[0, 1], [2, 0]]), "values": np.ones(2), "shape": np.array([3, 3])}
    else:
        held = matrix(rng).asformat(rng.choice(["csr", "csc", "coo", "bsr", "dia"]))
        sp.save_npz(stream, held)
        stream.seek(0)
        arrays = dict(np.load(stream))
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        name = rng.choice(list(arrays))
        arrays[name] = tampered(arrays[name], rng)
    stream = io.BytesIO()
    rng.choice([np.savez, np.savez_compressed])(stream, **arrays)
    return stream.getvalue()


def tampered(array: np.ndarray, rng: random.Random) -> np.ndarray:
    choice = rng.randrange(5)
    if choice == 0 and array.dtype.kind in "iufcb":
        with np.errstate(all="ignore"):
            return array.astype(rng.choice(DTYPES))
    if choice == 1:
        return array.reshape(-1)[: rng.randrange(array.size + 1)]
    if choice == 2:
        return np.array(rng.choice([-5, 2**40, "csr", b"dia", 1.5, b"\xff"]))
    if choice == 3 and array.size and array.dtype.kind in "iu":
        changed = array.copy().reshape(-1)
        number = rng.choice([-1, 7, 10**6, np.iinfo(array.dtype).max])
        changed[rng.randrange(array.size)] = np.array(number).astype(array.dtype)
        return changed.reshape(array.shape)
    return array[None] if array.ndim < 3 else array.reshape(-1)


KINDS = {"mtx": mtx, "smtx": smtx, "tns": tns, "npz": npz}


# ---------------------------------------------------------------------------------------------- mutations


def flipped(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 4, 32])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def removed(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice([1, 2, 8, 64])]


def repeated(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = data[start : start + rng.choice([1, 4, 40])] * rng.choice([1, 2, 1000])


def inserted(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.choice([b"\0", b"\n", b"%", b"\xff\xfe", b"-", b" ", b"e", os.urandom(0), rng.randbytes(9)])


def numbered(data: bytearray, rng: random.Random) -> None:
    """Another number in place of a word."""
    lines = bytes(data).split(b"\n")
    n = rng.randrange(len(lines))
    words = lines[n].split(b" ")
    words[rng.randrange(len(words))] = rng.choice(NUMBERS).encode()
    lines[n] = b" ".join(words)
    data[:] = b"\n".join(lines)


def shuffled(data: bytearray, rng: random.Random) -> None:
    lines = bytes(data).split(b"\n")
    rng.shuffle(lines)
    data[:] = b"\n".join(lines)


MUTATIONS = (flipped, cut, removed, repeated, inserted, numbered, numbered, numbered, shuffled)


def mutated(data: bytes, rng: random.Random, most: int = 3) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randrange(most + 1)):
        if found:
            rng.choice(MUTATIONS)(found, rng)
    return bytes(found)


def drawn_file(rng: random.Random) -> tuple[str, bytes]:
    """Name and contents of a file."""
    kind, packing = rng.choice(list(KINDS)), rng.choice(["", "", *PACKINGS])
    data = mutated(KINDS[kind](rng), rng)
    if rng.random() < 0.002:
        data += rng.choice([b"0", b"1 1\n", b"\n", b" "]) * (1 << 27 if packing else 1 << 20)  # a decompression bomb
    packed = PACKINGS[packing](data)
    if packing and rng.random() < 0.5:
        packed = mutated(packed, rng, most=2)
    return f"case.{kind}{packing}", packed


# ---------------------------------------------------------------------------------------------- judging


def outcome(path: Path) -> str:
    """``right``, ``refused``, or what is wrong."""
    from sparsetir.errors import SparseTIRError
    from sparsetir.io import read

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = unsound(read(path))
    except SparseTIRError as error:
        found = "" if str(error).startswith(str(path)) else f"wrong: the error does not name the file: {error}"
        found = found or "refused"
    except BaseException as error:
        found = f"wrong: {type(error).__name__}: {error}"
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return f"wrong: took {growth >> 20} MiB" if growth > GROWTH else found


def unsound(value: Any) -> str:
    if isinstance(value, sp.csr_array):
        value.check_format(full_check=True)
        return "right" if value.has_canonical_format and value.ndim == 2 else "wrong: not canonical"
    inside = (value.coords >= 0) & (value.coords < np.array(value.shape, object)[:, None])
    is_sound = inside.all() and value.coords.shape == (len(value.shape), len(value.values))
    return "right" if is_sound and value.values.dtype.kind in "biufc" else "wrong: unsound"


__all__ = ["drawn_file", "outcome"]
