# SPDX-License-Identifier: Apache-2.0
"""Reading matrices and tensors from files, good and bad."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from each import examples
from sparsetir.errors import ArgumentError, ArgumentTypeError, FileFormatError, MissingFileError
from sparsetir.interop import CooTensor
from sparsetir.io import read

MATRIX = np.array([[0, 1.5, 0], [2.25, 0, -3.0]])
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
BANNER = "%%MatrixMarket matrix coordinate real general\n"


def written(tmp_path, name, contents):
    path = tmp_path / name
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


def npz_of(**arrays):
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def scipy_npz(matrix):
    stream = io.BytesIO()
    sp.save_npz(stream, matrix)
    return stream.getvalue()


def mtx_of(matrix, **options):
    stream = io.BytesIO()
    scipy.io.mmwrite(stream, matrix, **options)
    return stream.getvalue()


def assert_csr(found, dense):
    assert type(found) is sp.csr_array
    assert found.has_canonical_format
    assert found.indices.dtype == found.indptr.dtype == np.int32
    assert found.dtype == dense.dtype
    np.testing.assert_array_equal(found.toarray(), dense)


@pytest.mark.parametrize("packing", PACKERS)
def test_every_format_packed_or_not(tmp_path, packing):
    pack = PACKERS[packing]
    tensor = CooTensor.from_dense(np.arange(8.0).reshape(2, 2, 2))
    for name, contents in {
        "a.mtx": mtx_of(sp.coo_array(MATRIX)),
        "a.b.NPZ": scipy_npz(sp.csr_array(MATRIX)),
    }.items():
        assert_csr(read(written(tmp_path, name + packing, pack(contents))), MATRIX)
    smtx = written(tmp_path, "a.smtx" + packing, pack(b"2, 3, 3\n0 1 3\n1 0 2\n"))
    assert_csr(read(str(smtx)), (MATRIX != 0).astype(np.float32))
    npz = npz_of(coords=tensor.coords, values=tensor.values, shape=np.array(tensor.shape))
    tns = "".join(f"{i + 1} {j + 1} {k + 1} {v}\n" for i, j, k, v in zip(*tensor.coords, tensor.values, strict=True))
    for name, contents in {"t.npz": npz, "t.tns": tns.encode()}.items():
        found = read(written(tmp_path, name + packing, pack(contents)))
        assert isinstance(found, CooTensor)
        np.testing.assert_array_equal(found.to_dense(), tensor.to_dense())


@pytest.mark.parametrize(
    "cls", ["csr_array", "csr_matrix", "csc_array", "coo_array", "coo_matrix", "bsr_array", "dia_array"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_npz_of_every_class_and_dtype(tmp_path, cls, dtype):
    dense = np.array([[1, 0], [2, 3]], dtype)
    assert_csr(read(written(tmp_path, "a.npz", scipy_npz(getattr(sp, cls)(dense)))), dense)


def test_npz_of_other_orders(tmp_path):
    for dense in (np.array([0, 2.0, 3.0]), np.arange(8.0).reshape(2, 2, 2)):
        found = read(written(tmp_path, "a.npz", scipy_npz(sp.coo_array(dense))))
        assert isinstance(found, CooTensor)
        np.testing.assert_array_equal(found.to_dense(), dense)


@pytest.mark.slow
@given(st.integers(0, 5), st.integers(0, 5), st.data())
@settings(max_examples=examples(50), deadline=None)
def test_matrices_read_as_written(tmp_path_factory, rows, cols, data):
    cells = st.sampled_from([0.0, 0.0, 1.0, -2.5, 1e-30])
    dense = np.array(data.draw(st.lists(cells, min_size=rows * cols, max_size=rows * cols))).reshape(rows, cols)
    folder = tmp_path_factory.mktemp("files")
    assert_csr(read(written(folder, "a.mtx", mtx_of(sp.coo_array(dense)))), dense)
    assert_csr(read(written(folder, "a.npz", scipy_npz(sp.csr_array(dense)))), dense)
    csr = sp.csr_array(dense)
    lines = [f"{rows}, {cols}, {csr.nnz}", " ".join(map(str, csr.indptr)), " ".join(map(str, csr.indices))]
    assert_csr(read(written(folder, "a.smtx", "\n".join(lines))), (dense != 0).astype(np.float32))


def test_matrix_market_fields_and_symmetries(tmp_path):
    symmetric = "%%MatrixMarket matrix coordinate pattern symmetric\n2 2 2\n1 1\n2 1\n"
    assert_csr(read(written(tmp_path, "s.mtx", symmetric)), np.array([[1.0, 1], [1, 0]]))
    whole = "%%MatrixMarket matrix coordinate integer general\n% note\n2 2 2\n1 2 3\n1 2 4\n"
    assert_csr(read(written(tmp_path, "i.mtx", whole)), np.array([[0, 7], [0, 0]]))
    assert_csr(read(written(tmp_path, "d.mtx", mtx_of(MATRIX))), MATRIX)


def test_tns_with_comments_repeats_and_blank_lines(tmp_path):
    found = read(written(tmp_path, "t.tns", "# FROSTT\n\n3 1 2.5 # the first\n1 2 -1\n3 1 1e-3\n"))
    assert found.shape == (3, 2)
    assert found.coords.tolist() == [[2, 0, 2], [0, 1, 0]]
    assert found.coords.dtype == np.int32
    assert found.values.tolist() == [2.5, -1, 1e-3]
    assert found.values.dtype == np.float64
    assert read(written(tmp_path, "wide.tns", "4294967296 1 2\n")).coords.dtype == np.int64


def tampered(**parts):
    held = {"data": np.ones(2), "indices": [0, 1], "indptr": [0, 1, 2], "shape": [2, 2], "format": b"csr"}
    return npz_of(**{name: np.asarray(part) for name, part in {**held, **parts}.items() if part is not None})


BAD = {
    "banner.mtx": ("hello", "is not a readable .mtx file: Line 1: Not a Matrix Market file"),
    "outside.mtx": (BANNER + "2 2 1\n1 3 1.0\n", "Line 3: Column index out of bounds"),
    "word.mtx": (BANNER + "2 2 1\n1 1 x\n", "line 3: expected row, column, real value, got '1 1 x'"),
    "short.mtx": (BANNER + "2 2 2\n1 1 1.0\n", "Truncated file. Expected another 1 lines"),
    "text.npz": ("hello", "expected an npz archive, which is a zip file, got something else"),
    "other.npz": (npz_of(xyz=np.ones(3), b=np.ones(1)), "coords, values and shape, got b, xyz"),
    "none.npz": (npz_of(), "got none"),
    "cut.npz": (scipy_npz(sp.csr_array(MATRIX))[:-40], "expected an npz archive"),
    "pickle.npz": (npz_of(format=np.array([{}], object)), "is not a readable .npz file: .*allow_pickle"),
    "part.npz": (tampered(data=None), "is not a readable .npz file: .*data"),
    "format.npz": (tampered(format=b"xyz"), 'Unknown format "xyz_matrix"'),
    "list.npz": (tampered(format=b"lil"), "not implemented for sparse matrix of format lil"),
    "indices.npz": (tampered(indices=[0, 7]), "is not a readable .npz file: .*indices"),
    "indptr.npz": (tampered(indptr=[0, 5, 2]), "is not a readable .npz file: .*ind(ptr|ex pointer)"),
    "outside.npz": (
        npz_of(coords=[[0, 2]], values=[1.0, 2.0], shape=[2]),
        r"entry 1 has coordinates \(2,\), outside the shape \(2,\)",
    ),
    "float.npz": (
        npz_of(coords=[[0.5]], values=[1.0], shape=[2]),
        "coords of a CooTensor: expected integers, got float64",
    ),
    "sizes.npz": (npz_of(coords=[[0]], values=[1.0, 2.0], shape=[2]), "needs coords .* got coords of shape"),
    "empty.smtx": ("", "line 1: expected \"rows, columns, nnz\", got ''"),
    "head.smtx": ("2, 3\n0 1\n0\n", "line 1: expected \"rows, columns, nnz\", got '2, 3'"),
    "minus.smtx": ("2, -3, 1\n0 1\n0\n", 'line 1: expected "rows, columns, nnz"'),
    "word.smtx": ("2, 3, 1\n0 one 1\n0\n", "line 2: expected integers, got 'one'"),
    "huge.smtx": ("2, 3, 1\n0 1 99999999999999999999\n0\n", "line 2: expected integers"),
    "nnz.smtx": ("2, 3, 2\n0 1 1\n0\n", "line 3: expected 2 column indices, got 1"),
    "rows.smtx": ("2, 3, 1\n0 1\n0\n", r"indptr of axis columns of the file has shape \(2,\), expected length 3"),
    "order.smtx": ("2, 3, 1\n0 2 1\n0\n", "decreases at row 1: 2 is followed by 1"),
    "range.smtx": ("2, 3, 1\n0 1 1\n3\n", r"hold 3 at position 0, expected one of \[0, 3\)"),
    "empty.tns": ("# nothing\n", "the file has no entries, so the tensor's order is not known"),
    "ragged.tns": ("# c\n1 1 1.0\n\n1 2\n", "line 4: expected 3 numbers like the lines before it, got 2"),
    "word.tns": ("1 1 1.0\n1 x 1.0\n", "line 2: 'x' is not a number"),
    "zero.tns": ("# c\n1 1 1.0\n0 1 1.0\n", "line 3: coordinates must be whole numbers from 1 on, got 0 1"),
    "half.tns": ("1 1.5 1.0\n", "line 1: coordinates must be whole numbers from 1 on, got 1 1.5"),
    "nan.tns": ("nan 1 1.0\n", "line 1: coordinates must be whole numbers"),
    "single.tns": ("\n1\n", "line 2: expected coordinates and a value, got a single number"),
    "plain.mtx.gz": (BANNER, "is not a readable .mtx file: Not a gzipped file"),
    "plain.tns.xz": ("1 1 1", "is not a readable .tns file: Input format not supported"),
    "cut.smtx.gz": (gzip.compress(b"2, 3, 1\n0 1 1\n0\n")[:-9], "is not a readable .smtx file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, name):
    contents, expected = BAD[name]
    with pytest.raises(FileFormatError, match=expected) as caught:
        read(written(tmp_path, name, contents))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a", "a.gz", "a.txt.gz", ".mtx"])
def test_unknown_extension(tmp_path, name):
    path = written(tmp_path, name, "")
    expected = re.escape(f"{path} has no known extension: expected .mtx, .npz, .smtx, .tns, each also with .gz or .xz")
    with pytest.raises(FileFormatError, match=expected):
        read(path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*gone\.mtx"):
        read(tmp_path / "gone.mtx")
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_no_permission_is_not_a_format_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no")

    monkeypatch.setattr("builtins.open", refuse)
    path = tmp_path / "a.mtx"
    path.touch()
    with pytest.raises(PermissionError):
        read(path)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif("SPARSETIR_DATA" not in os.environ, reason="SPARSETIR_DATA names no folder")
def test_real_files():
    root = Path(os.environ["SPARSETIR_DATA"])
    for entry in json.loads((root / "MANIFEST.json").read_text())["files"]:
        path = root / entry["file"]
        if entry["kind"] not in ("csr", "coo_tensor") or not path.is_file() or path.stat().st_size > 1 << 22:
            continue
        found = read(path)
        assert found.nnz == entry["nnz"]
        assert found.dtype == entry.get("dtype", "float32")
        assert isinstance(found, CooTensor if entry["kind"] == "coo_tensor" else sp.csr_array)
    west = read(root / "original" / "west0479.mtx")
    assert (west.shape, west.nnz) == ((479, 479), 1910)  # 22 of the entries are written as zero


# ---------------------------------------------------------------------------------------------- hostile files

HOSTILE = {
    "words.mtx": b"x\nx\nx\n",
    "banner.mtx": BANNER.replace("coordinate", "coordinat\xff").encode("latin1") + b"2 2 1\n1 1 1\n",
    "zero.mtx": BANNER.encode() + b"2 2 1\n1 1 5\x00\n",
    "zero.mtx.xz": lzma.compress(BANNER.encode() + b"2 2 1\n1 1 5\x00\n"),
    "edges.mtx": b"1 2 3.0\n" * 2000,
    "tall.mtx": BANNER.encode() + b"900000000 1 0\n",
    "taller.mtx.xz": lzma.compress(BANNER.encode() + b"1000000000000 6 1\n1 1 1\n"),
    "many.mtx": BANNER.encode() + b"2 2 900000000000\n1 1 1\n",
    "dense.mtx": b"%%MatrixMarket matrix array real general\n2000000 2000000\n1\n",
    "format.npz": tampered(format=-5),
    "pointers.npz": tampered(format=b"bsr", data=np.ones((0, 1, 1)), indices=np.zeros(0, int), indptr=[0, 10**6, 0]),
    "letters.npz": tampered(data=["a", "b"]),
    "dates.npz": tampered(data=np.zeros(2, "datetime64[s]")),
    "zip.npz.gz": gzip.compress(b"PK\x05\x06" + bytes(18)),
    "minus.npz": npz_of(coords=np.zeros((1, 0), int), values=np.ones(0), shape=[-3]),
    "bomb.smtx.gz": gzip.compress(b"1 " * (1 << 19)) * 128,
    "bomb.tns.xz": lzma.compress(b"1 " * (1 << 19), preset=0) * 128,
    "cut.tns.xz": lzma.compress(b"1 1 1.0\n" * 50)[:-20],
    "tail.tns.xz": lzma.compress(b"1 1 1.0\n") + b"more",
    "none.tns.xz": b"",
    "none.tns.gz": b"",
}


def undersized_npz() -> bytes:
    """An array that declares more elements than the archive holds."""
    stream = io.BytesIO()
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("values.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    return stream.getvalue()


@pytest.mark.parametrize("name", [*HOSTILE, "huge.npz"])
def test_hostile_files_are_refused(tmp_path, name):
    path = written(tmp_path, name, HOSTILE.get(name) or (undersized_npz() if name == "huge.npz" else b""))
    with pytest.raises(FileFormatError, match=re.escape(str(path))):
        read(path)


def test_the_sentences_for_what_cannot_be(tmp_path):
    for name, expected in {
        "many.mtx": "2 x 2 with 900000000000 entries are declared in ",
        "tall.mtx": "900,000,000 rows are declared, expected at most 16,777,216 in a file of ",
        "bomb.smtx.gz": "expand to more than 67,108,864: unpack it by hand",
        "cut.tns.xz": "the compressed data ends too early",
        "zero.mtx": "expected text, got a zero byte",
        "minus.npz": r"expected a shape of sizes that are not negative, got \(-3,\)",
    }.items():
        with pytest.raises(FileFormatError, match=expected):
            read(written(tmp_path, name, HOSTILE[name]))


def test_xz_files_of_several_streams(tmp_path):
    text = b"1 2 5.0\n" * 3
    packed = lzma.compress(text[:8]) + bytes(8) + lzma.compress(text[8:])
    assert read(written(tmp_path, "a.tns.xz", packed)).values.tolist() == [5.0] * 3


def test_a_file_that_ends_inside_a_number(tmp_path):
    head = "%%MatrixMarket matrix array real general\n1 2\n"
    assert read(written(tmp_path, "a.mtx", head + "1.5\n9.28")).toarray().tolist() == [[1.5, 9.28]]
    with pytest.raises(FileFormatError, match=r"line 4: expected real value, got '9\.28E'"):
        read(written(tmp_path, "a.mtx", head + "1.5\n9.28E"))


# ---------------------------------------------------------------------------------------------- strict numbers

PYTHON = {"real": float, "integer": int, "pattern": None, "complex": float, "double": float}
WORDS = st.one_of(
    st.sampled_from(
        "1 -2 +3 0 007 1.5 .5 5. -.25e3 1.5D+02 2d-1 1E5 0x10 1_0 1.5.2 1e 1e+ -- +-1 inf -Infinity nan 1,5 1f 1L "
        "1.5+100 1j (1) 1e400 1e-400 # % 9007199254740993 99999999999999999999 1\x0b2 \u0663 True None .".split()
    ),
    st.text("0123456789.eEdD+-_xX ,#%\t", min_size=1, max_size=6),
)


def strictly(word, number):
    """Parse a number as Python does, with Fortran's exponents; None where the word is no number."""
    if "_" in word or not word.isascii():
        return None
    try:
        return number(word if number is int else re.sub("[dD]", "e", word))
    except ValueError:
        return None


def read_or_none(path):
    try:
        return read(path)
    except FileFormatError:
        return None


def same(one, other):
    return one == other or (one != one and other != other)


@given(st.sampled_from([*PYTHON]), st.lists(WORDS, max_size=4), st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_mtx_lines_are_read_as_python_reads_them_or_refused(tmp_path_factory, field, words, is_dense):
    assume(not (is_dense and field == "pattern"))
    layout, sizes = ("array", "1 1") if is_dense else ("coordinate", "1 1 1")
    head = f"%%MatrixMarket matrix {layout} {field} general\n{sizes}\n"
    line = " ".join([*([] if is_dense else ["1", "1"]), *words])
    found = read_or_none(written(tmp_path_factory.mktemp("m"), "a.mtx", head + line + "\n"))
    values = [strictly(word, PYTHON[field]) for word in " ".join(words).split()] if PYTHON[field] else []
    if found is None:
        return
    count = {"pattern": 0, "complex": 2}.get(field, 1)
    assert len(" ".join(words).split()) == len(values) == count
    assert None not in values
    wanted = complex(*values) if field == "complex" else values[0] if values else 1
    number = found.toarray()[0, 0].item()
    parts = [(wanted, number)] if field != "complex" else [(wanted.real, number.real), (wanted.imag, number.imag)]
    assert all(same(*pair) for pair in parts), (line, number)


@given(st.lists(WORDS, min_size=1, max_size=4))
@settings(max_examples=examples(400), deadline=None)
def test_tns_lines_are_read_as_python_reads_them_or_refused(tmp_path_factory, words):
    line = " ".join(words)
    found = read_or_none(written(tmp_path_factory.mktemp("t"), "a.tns", f"{line}\n"))
    if found is None:
        return
    *coords, value = line.partition("#")[0].split()
    assert [strictly(word, int) for word in coords] == [n + 1 for n in found.coords[:, 0].tolist()]
    assert same(strictly(value, float), found.values[0].item())


@given(st.lists(WORDS, min_size=3, max_size=3), WORDS)
@settings(max_examples=examples(300), deadline=None)
def test_smtx_lines_are_read_as_python_reads_them_or_refused(tmp_path_factory, header, index):
    text = f"{', '.join(header)}\n0 1\n{index}\n"
    found = read_or_none(written(tmp_path_factory.mktemp("s"), "a.smtx", text))
    if found is not None:
        assert [*found.shape, found.nnz] == [
            strictly(word, int) for word in re.split(r"[,\s]+", " ".join(header).strip())
        ]
        assert found.indices.tolist() == [strictly(word, int) for word in index.split()]


@pytest.mark.parametrize("word", ["1.5D+02", "1.5d2", "+150", "150.", "15.0E+1", "150"])
def test_numbers_of_other_languages(tmp_path, word):
    assert read(written(tmp_path, "a.mtx", f"{BANNER}1 1 1\n+1 1 {word}")).toarray() == [[150.0]]
    assert read(written(tmp_path, "a.tns", f"1 1 {word}")).values == [150.0]


STRICT = {
    "integer.mtx": (BANNER.replace("real", "integer") + "1 1 1\n1 1 1.5\n", "line 3: .*integer value, got '1 1 1.5'"),
    "pattern.mtx": (BANNER.replace("real", "pattern") + "1 1 1\n1 1 7.5\n", "expected row, column, got '1 1 7.5'"),
    "column.mtx": (BANNER + "% a note\n\n1 1 2\n1 1 1\n1 1 1 5\n", "line 6: expected row, column, real value"),
    "banner.mtx": (BANNER.replace("general", "general x") + "1 1 1\n1 1 1\n", "line 1: expected a banner of 5 words"),
    "more.smtx": ("1 1 1\n0 1\n0\n0\n", "line 4: expected three lines, got '0'"),
    "under.smtx": ("1 1 1_0\n0 1\n0\n", "line 1: expected integers, got '1_0'"),
    "real.tns": ("1 1 2\n1.0 1 2\n", r"line 2: expected 2 integers and a value, got '1.0 1 2'"),
    "shape.npz": (npz_of(coords=[[0]], values=[1.0], shape=[3.5]), r"shape: expected integers, got float64"),
    "scipy.npz": (tampered(shape=[2.5, 2]), r"shape: expected integers, got float64: \[2.5, 2.0\]"),
    "scalar.npz": (npz_of(coords=[[0]], values=[1.0], shape=3), r"shape: expected one size for each dimension"),
    "indices.npz": (tampered(indices=[0.0, 1.5]), "indices: expected integers, got float64"),
    "indptr.npz": (tampered(indptr=[0.0, 1, 2]), "indptr: expected integers, got float64"),
    "bool.npz": (tampered(indices=[False, True]), "indices: expected integers, got bool"),
    "uint64.npz": (npz_of(coords=[[0]], values=[1.0], shape=np.array([2**63], "uint64")), r"integers below 2\*\*63"),
}


@pytest.mark.parametrize("name", STRICT)
def test_what_a_cast_would_lose_is_refused(tmp_path, name):
    contents, expected = STRICT[name]
    with pytest.raises(FileFormatError, match=expected) as caught:
        read(written(tmp_path, name, contents))
    assert name in str(caught.value)


def test_arrays_without_elements(tmp_path):
    for sizes in ("0 3", "3 0"):
        text = f"%%MatrixMarket matrix array integer general\n{sizes}\n\n1\n"
        found = read(written(tmp_path, "a.mtx", text))
        assert (found.shape, found.nnz, found.dtype) == (tuple(map(int, sizes.split())), 0, np.int64)


def test_names_that_are_no_files(tmp_path):
    with pytest.raises(MissingFileError, match="there is no file"):
        read("gone.mtx")
    for name in ("x" * 5000, "a\0b.mtx"):
        with pytest.raises(ArgumentError, match=r"path: expected the path of a file, got .* Choose another name"):
            read(name)
    for value in (3, None, b"a.mtx"):
        with pytest.raises(ArgumentTypeError, match="path: expected the path of a file, got "):
            read(value)
