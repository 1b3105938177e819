# SPDX-License-Identifier: Apache-2.0
"""``sparsetir bench training``."""

from __future__ import annotations

from sparsetir.bench.training import main

if __name__ == "__main__":
    main()
