# SPDX-License-Identifier: Apache-2.0
"""What editors and type checkers see of the dialect."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import tvm_ffi
from tvm.script import sparsetir as dialect

import sparsetir
from sparsetir import T
from sparsetir.script import builder

ROOT = Path(__file__).parents[2]
STUB = ast.parse((ROOT / "sparsetir" / "script" / "tvmscript.pyi").read_text(encoding="utf-8"))
DECLARED = [node for node in STUB.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"]
ABSTRACT = {"Expr", "Axis"}  # types of values, which programs do not name
OWN = [n for n, f in vars(builder).items() if n in dir(dialect) and getattr(f, "__module__", "") == builder.__name__]
OWN = [name for name in OWN if inspect.isfunction(vars(builder)[name])]

PROGRAM = '''
from __future__ import annotations

import sparsetir
from sparsetir import T


@T.prim_func
def largest(a: T.handle, x: T.handle, y: T.handle, p: T.handle, i_: T.handle, m: T.int32, n: T.int32) -> None:
    """The largest of each row."""
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, n, (p, i_))
    J_dense = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_dense,), "float32")
    Y = T.match_sparse_buffer(y, (I,), "float32")
    with T.sp_iter([I, J], "SR", "largest") as [i, j]:
        with T.init():
            Y[i] = T.float32("-inf")
        Y[i] = T.max(Y[i], T.exp(A[i, j]) * X[j] + 1)


kernel = sparsetir.build(largest)
'''


def test_declared_names_exist() -> None:
    assert {node.name for node in DECLARED} - ABSTRACT <= set(dir(dialect))
    assert len(DECLARED) > 60


@pytest.mark.parametrize("name", OWN)
def test_signatures_are_those_of_the_functions(name: str) -> None:
    node = next(n for n in DECLARED if isinstance(n, ast.FunctionDef) and n.name == name)
    arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)] + (
        [node.args.vararg.arg] if node.args.vararg else []
    )
    assert sorted(arguments) == sorted(inspect.signature(getattr(builder, name)).parameters)
    assert ast.get_docstring(node)


def test_the_import_is_the_dialect() -> None:
    assert sparsetir.T.sp_iter is dialect.sp_iter
    assert T.prim_func is dialect.prim_func
    parsed = sparsetir.parse(PROGRAM.partition("@")[1] + PROGRAM.partition("@")[2].partition("\n\n\nkernel")[0])
    assert tvm_ffi.structural_equal(parsed, sparsetir.parse(sparsetir.script(parsed)), map_free_vars=True)


# What other packages are made of takes mypy ten seconds.
SETTINGS = """[mypy]
strict = true
follow_imports = silent
ignore_missing_imports = true
[mypy-matplotlib.*,pyarrow.*,scipy.*,torch.*,tvm.*,tvm_ffi.*,xgboost.*]
follow_imports = skip
"""


def mypy(folder: Path, *paths: Path) -> tuple[int, str]:
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={settings}", f"--cache-dir={folder}", *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_strict_checkers_find_no_error(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(PROGRAM)
    bad.write_text(PROGRAM.replace("T.dense_fixed(m)", "T.dense_fixed()").replace('"SR"', "2"))
    examples = [ROOT / "examples" / f"{name}.py" for name in ("spmm", "csf_mttkrp", "gallery/fused_attention")]
    assert mypy(tmp_path, good, *examples) == (0, "Success: no issues found in 4 source files\n")
    status, text = mypy(tmp_path, bad)
    assert status == 1
    assert "dense_fixed" in text
    assert "sp_iter" in text
