# SPDX-License-Identifier: Apache-2.0
"""Training of graph networks with `sparsetir.torch`, beside torch's sparse matrices and torch_geometric.

``sparsetir bench training`` prints a table; ``examples/training/graph_network.py`` trains one network and
draws its losses.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsetir.utils.packages import require


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    require("torch", extra="torch", purpose="sparsetir.bench.training")
    from sparsetir.bench.training.measure import main as run

    run(argv)


__all__ = ["main"]
