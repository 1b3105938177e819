# SPDX-License-Identifier: Apache-2.0
"""``sparsetir spmm`` and ``sparsetir pca``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from sparsetir.cli import DONE, WRONG_USE, main
from sparsetir.errors import ArgumentError
from tests.quick_code import quick_code


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    A = sp.random_array((900, 40), density=0.2, format="csr", dtype="float32", rng=np.random.default_rng(0))
    sparsetir.save_blocks(A, "A")
    np.save("B.npy", np.ones((40, 3), "float32"))
    with quick_code():
        yield


def test_spmm_writes_a_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spmm", "A", "--dense", "B.npy", "--memory", "200K", "--out", "C.npy"]) == DONE
    out, progress = capsys.readouterr()
    assert "blocks," in out
    assert out.endswith("wrote C.npy\n")
    assert "s left" in progress
    np.testing.assert_allclose(np.load("C.npy"), sparsetir.read("A") @ np.load("B.npy"), rtol=1e-5)


def test_pca_writes_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pca", "A", "-k", "4", "--quiet"]) == DONE
    out, progress = capsys.readouterr()
    assert "4 components explain" in out
    assert progress == ""
    with np.load("pca.npz") as arrays:
        assert arrays["components_"].shape == (4, 40)
        D = sparsetir.read("A").toarray()
        values = np.linalg.svd(D - D.mean(axis=0), compute_uv=False)[:4]
        np.testing.assert_allclose(arrays["singular_values_"], values, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spmm", "A", "--dense", "A/shape.npy", "--out", "C.npy"], "expected 40 rows"),
        (["spmm", "A", "--dense", "missing.npy", "--out", "C.npy"], "missing.npy"),
        (["spmm", "A", "--dense", "B.npy", "--out", "B.npy"], "expected another file than the dense operand's"),
        (["spmm", "A", "--dense", "B.npy", "--out", "no/C.npy"], "expected a .npy file in a folder that exists"),
        (["spmm", "A", "--dense", "B.npy", "--out", "C.npy", "--memory", "9K"], "expected"),
        (["spmm", "B.npy", "--dense", "B.npy", "--out", "C.npy"], "expected a folder of .npy files"),
        (["pca", "A", "-k", "50"], "expected 1 to 40 components"),
        (["pca", "A", "--memory", "much"], "expected a size such as '2GiB'"),
    ],
)
def test_wrong_use_is_a_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == WRONG_USE
    assert message in capsys.readouterr().err
    assert not Path("C.npy").exists()
    assert np.load("B.npy").shape == (40, 3)


def test_an_operand_is_not_replaced_while_it_is_read() -> None:
    A = sparsetir.open_blocks("A")
    B = np.load("B.npy", mmap_mode="r")
    for view in (B, np.asarray(B), B[:, :2]):
        with pytest.raises(ArgumentError, match="expected another file than the dense operand's"):
            A.spmm(view, out="B.npy")
    assert A.spmm(B, out="C.npy").exists()
