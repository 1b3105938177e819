# SPDX-License-Identifier: Apache-2.0
"""Parameters that got new names are still taken by their old ones, with a warning and the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm
from tvm import relax

import sparsetir
from sparsetir import cli, formats, ops
from sparsetir.bench import expressions
from sparsetir.errors import ArgumentTypeError

A = sp.csr_array(np.array([[1, 2, 0], [0, 3, 0], [4, 0, 5]], "float32"))
x = np.arange(3, dtype="float32")


def model() -> Any:
    """Return a model with one addition, which needs none of our kernels."""
    builder = relax.BlockBuilder()
    v = relax.Var("v", relax.TensorType((3, 3), "float32"))
    with builder.function("main", [v]):
        builder.emit_func_output(builder.emit(relax.op.add(v, v)))
    return builder.get()


def built(**options: Any) -> tuple[Any, ...]:
    kernel = sparsetir.build(ops.spmv(), **options)
    return kernel.expected_calls, kernel.assume_finite, kernel(A=A, x=x).tolist()


def constructed(**options: Any) -> tuple[Any, ...]:
    kernel = sparsetir.build(ops.spmv())
    kernel = sparsetir.Kernel(kernel.func, kernel.compiled, **options)
    return kernel.expected_calls, kernel.assume_finite


def tuned(**options: Any) -> list[str]:
    result = sparsetir.tune_sparse(ops.spmv(), {"A": A, "x": x}, max_trials=1, progress=False, **options)
    return sorted(result.peers)


def tuned_many(**options: Any) -> int:
    return len(sparsetir.tune_many([(ops.spmv(), {"A": A, "x": x})], seconds=0.05, **options))


def decomposed(**options: Any) -> tuple[bool, bool]:
    parts = sparsetir.decompose_format(ops.spmv(), {"A": formats.bsr(2, 2)}, **options)
    return parts.assume_finite, parts.multiplies_zeros


def selecting(**options: Any) -> list[list[float]]:
    kernel = sparsetir.build(ops.spgemm()).selecting()
    assert (kernel.bind(A=A, **options)(B=A) != kernel(A=A, B=A, **options)).nnz == 0
    return kernel(A=A, B=A, **options).toarray().tolist()


def lowered(**options: Any) -> str:
    return str(sparsetir.relax.LowerSparse(**options)(model()).script())


def built_model(**options: Any) -> list[list[float]]:
    main = relax.VirtualMachine(sparsetir.relax.build(model(), **options), tvm.cpu())["main"]
    return main(tvm.runtime.tensor(A.toarray())).numpy().tolist()


def compiled_model(**options: Any) -> list[list[float]]:
    return np.asarray(sparsetir.relax.compile_model(model(), **options)(A.toarray())).tolist()


CASES: list[tuple[Callable[..., Any], str, str, Any]] = [
    (built, "calls", "expected_calls", 7),
    (built, "finite", "assume_finite", True),
    (constructed, "calls", "expected_calls", 7),
    (constructed, "finite", "assume_finite", True),
    (lambda **options: sparsetir.linear_operator(A, **options).matvec(x).tolist(), "calls", "expected_calls", 0),
    (lambda **options: sparsetir.TuneTask(None, {}, **options).expected_calls, "calls", "expected_calls", 3.0),
    (lambda **options: sparsetir.matmul(A, A, **options).toarray().tolist(), "above", "threshold", 4.5),
    (selecting, "above", "threshold", 4.5),
    (decomposed, "finite", "assume_finite", False),
    (tuned, "against", "compare_with", ["scipy"]),
    (tuned, "until", "stop_probability", 0.5),
    (tuned, "finite", "assume_finite", True),
    (tuned_many, "finite", "assume_finite", True),
    (lowered, "finite", "assume_finite", True),
    (built_model, "finite", "assume_finite", True),
    (compiled_model, "finite", "assume_finite", True),
]


@pytest.mark.parametrize(("call", "old", "new", "value"), CASES)
def test_old_names_are_taken_with_a_warning(call: Callable[..., Any], old: str, new: str, value: Any) -> None:
    with pytest.warns(DeprecationWarning, match=rf"\({old}=\) is now .*\({new}=\)") as caught:
        result = call(**{old: value})
    assert {warning.filename for warning in caught if warning.category is DeprecationWarning} == {__file__}
    assert result == call(**{new: value})


def test_attributes_are_read_by_old_names() -> None:
    kernel = sparsetir.build(ops.spmv(), expected_calls=7)
    task = sparsetir.TuneTask(None, {}, 3.0)
    parts = sparsetir.decompose_format(ops.spmv(), {"A": formats.bsr(2, 2)}, assume_finite=False)
    with pytest.warns(DeprecationWarning, match=r"TuneTask\.calls is now TuneTask\.expected_calls"):
        assert task.calls == 3.0
    with pytest.warns(DeprecationWarning, match="is now Kernel"):
        assert (kernel.calls, kernel.finite) == (7, False)
    with pytest.warns(DeprecationWarning, match="is now Decomposition"):
        assert parts.finite is False


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="threshold: expected one value, got another one as above"):
        sparsetir.matmul(A, A, above=1, threshold=1)
    with pytest.raises(TypeError, match=r"matmul\(\) got an unexpected keyword argument 'below'"):
        sparsetir.matmul(A, A, below=1)


def test_old_options_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "A.npz"
    sp.save_npz(path, A)
    with pytest.warns(FutureWarning, match="--against is now --compare-with"):
        assert cli.main(["tune", str(path), "--op", "spmv", "--trials", "1", "--against", "scipy"]) == 0
    assert "scipy" in capsys.readouterr().out
    with pytest.warns(FutureWarning, match="--against is now --compare-with"), pytest.raises(SystemExit):
        expressions.main(["--against", "nobody"])
