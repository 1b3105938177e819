# SPDX-License-Identifier: Apache-2.0
"""``python -m sparsetir``: the command line."""

from sparsetir.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
