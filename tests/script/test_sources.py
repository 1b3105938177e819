# SPDX-License-Identifier: Apache-2.0
"""Where the text of a program is found when it stands in no module: a prompt, a command line, a plug-in."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sparsetir
from sparsetir.errors import ArgumentTypeError, ScriptError
from sparsetir.script import prim_func

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """\
from tvm.script import sparsetir as T
@T.prim_func
def double(a: T.handle, b: T.handle, n: T.int32):
    I = T.dense_fixed(n)
    A = T.match_sparse_buffer(a, (I,))
    B = T.match_sparse_buffer(b, (I,))
    with T.sp_iter([I], "S", "double") as [i]:
        B[i] = 2 * A[i]
"""
IN_A_FUNCTION = "def make(T):\n" + "".join(f"    {line}\n" for line in PROGRAM.splitlines()[1:]) + "    return double\n"


def first_blocks() -> list[str]:
    """The README's code up to its first program."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = next(n for n, block in enumerate(found) if "@T.prim_func" in block)
    return found[: program + 1]


def run(text: str, name: str = "<stdin>") -> dict[str, Any]:
    """The names after a text of which Python keeps nothing was run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    return names


def typed(monkeypatch: pytest.MonkeyPatch, *items: str) -> None:
    """Make the prompt's history hold these lines."""
    history = SimpleNamespace(
        get_current_history_length=lambda: len(items), get_history_item=lambda n: items[n - 1] if n else None
    )
    monkeypatch.setitem(sys.modules, "readline", history)


def statements(text: str) -> list[str]:
    """The statements of a program, as the prompt compiles each for itself."""
    return ["from tvm.script import sparsetir as T\n", text.partition("\n")[2]]


def test_what_is_typed_is_read_from_the_prompt_s_history(monkeypatch: pytest.MonkeyPatch) -> None:
    other = PROGRAM.replace("2 * A", "3 * A")
    typed(monkeypatch, *other.splitlines(), *PROGRAM.splitlines(), "double", *other.splitlines()[:2])
    names = run(statements(PROGRAM)[0])
    exec(compile(statements(PROGRAM)[1], "<stdin>", "exec"), names)
    assert "T.float32(2.0) * A[i]" in sparsetir.script(names["double"])


def test_what_was_pasted_is_one_item_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "from tvm.script import sparsetir as T", IN_A_FUNCTION, "make(T)")
    assert "def double(" in sparsetir.script(run(IN_A_FUNCTION)["make"](sparsetir_T()))


def sparsetir_T() -> Any:
    from tvm.script import sparsetir as T

    return T


def test_another_text_with_the_same_name_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, *PROGRAM.replace("2 *", "3 *").splitlines())
    with pytest.raises(ScriptError, match=r"the text of double is not to be found, as Python keeps none of <stdin>"):
        run(PROGRAM)


def test_the_command_line_s_program_is_read_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["-c", PROGRAM], ["-Ic", PROGRAM], [f"-c{PROGRAM}"], ["-m", "x", "-c", IN_A_FUNCTION]):
        monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
        text = IN_A_FUNCTION if arguments[-1] == IN_A_FUNCTION else PROGRAM
        names = run(text, "<string>")
        func = names["double"] if "double" in names else names["make"](sparsetir_T())
        assert 'with T.sp_iter([I], "S", "double") as [i]:' in sparsetir.script(func)


def test_a_text_for_exec_says_what_to_do() -> None:
    with pytest.raises(ScriptError) as caught:
        run(PROGRAM, "<string>")
    for remedy in ("a file, a notebook or an IPython session", "sparsetir.parse", "exec(compile(text, path, 'exec'))"):
        assert remedy in str(caught.value)


def test_a_text_for_exec_with_its_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    assert "double" in run(PROGRAM, str(path))


def test_what_is_no_function_is_refused() -> None:
    for found, name in ((len, "builtin_function_or_method"), (3, "int")):
        with pytest.raises(ArgumentTypeError, match=f"T.prim_func decorates a function, got {name}"):
            prim_func(found)


def test_a_module_that_is_not_registered_quotes_the_line_at_fault(tmp_path: Path) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(f"# a plug-in\n\n\n{PROGRAM}".replace("2 * A[i]", "2 * A[i, i]"))
    spec = importlib.util.spec_from_file_location("plugin", path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ScriptError) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "plugin.py:11:" in str(caught.value)
    assert " 11 |          B[i] = 2 * A[i, i]" in str(caught.value)


def test_standard_input_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"{PROGRAM}print(len(double.params))\n")
    with path.open() as stdin:
        out = subprocess.run([sys.executable, "-"], stdin=stdin, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.stdout == "3\n", out.stderr


def test_the_first_program_of_the_readme_at_the_prompt() -> None:
    pty = pytest.importorskip("pty")
    main, end = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
    prompt = subprocess.Popen(
        [sys.executable, "-q"], stdin=end, stdout=end, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
    )
    os.close(end)
    entered = "\n\n".join(first_blocks())
    os.write(main, f"{entered}\nexit()\n".encode())
    shown = b""
    try:
        while part := os.read(main, 65536):
            shown += part
    except OSError:
        pass  # how the other end's closing shows on Linux
    prompt.wait(timeout=120)
    os.close(main)
    signature = b"spmm(A: float32[m, n] csr, B: float32[n, feat]) -> C: float32[m, feat]"
    assert b"Kernel " + signature + b"\r\n(1000, 64)\r\nTrue" in shown, shown.decode()
