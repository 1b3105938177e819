# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``python -m tests.fuzzing`` and ``python tests/fuzzing``."""

import os
import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[1])
# Modules of this folder are imported as those of the package `fuzzing`, never by their own names.
sys.path[:] = [TESTS, *(p for p in sys.path if Path(p or ".").resolve() != Path(TESTS, "fuzzing"))]
# Compiled programs stay out of the user's cache, and small arrays need no second thread.
os.environ.setdefault("SPARSETIR_CACHE", "off")
os.environ.setdefault("TVM_NUM_THREADS", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    from fuzzing.command import main

    sys.exit(main())
