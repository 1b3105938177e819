# SPDX-License-Identifier: Apache-2.0
"""scipy's and scikit-learn's own tests with every operand on a kernel. Run ``python -m tests.scipy.suites``.

Arguments are those of pytest, by default scipy's package of sparse matrices. It is a plugin of that run: a kernel is
used wherever one applies, however small the operands are, and scipy computes only what kernels refuse.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsetir.scipy import accelerate, selection


def _run_kernel(
    self: selection.TimedSelection,
    key: selection.Key,
    size: tuple[int, ...],
    by_scipy: Callable[[], Any],
    by_kernel: Callable[[Any], Any],
) -> Any:
    kernel = self.libraries.get(key)
    result = None if kernel is None else by_kernel(kernel)
    return by_scipy() if result is None else result


def pytest_configure() -> None:
    selection.TimedSelection.run = _run_kernel  # type: ignore[method-assign]
    accelerate(threads=2, min_entries=0, wait=True)


if __name__ == "__main__":
    arguments = sys.argv[1:] or ["--pyargs", "scipy.sparse"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.scipy.suites", *arguments]
    folders = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    with tempfile.TemporaryDirectory() as elsewhere:  # this project's settings of pytest are not theirs
        sys.exit(subprocess.run(command, cwd=elsewhere, env=environment, check=False).returncode)
