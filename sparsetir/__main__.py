# SPDX-License-Identifier: Apache-2.0
"""``python -m sparsetir``: the command line."""

from __future__ import annotations

from sparsetir.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
