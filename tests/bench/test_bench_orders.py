# SPDX-License-Identifier: Apache-2.0
"""The table of orders, on tiny chains."""

from __future__ import annotations

import numpy as np
import pytest

from sparsetir.bench import orders
from sparsetir.workloads import suite


@pytest.mark.slow
def test_all_orders_of_a_chain_agree() -> None:
    A = suite.generate("uniform", 400, seed=1)
    for shape in orders.SHAPES:
        values = orders.operands(A, shape)
        found = [orders.evaluate(tree, values) for tree in orders.trees(0, len(values))]
        dense = [v if isinstance(v, np.ndarray) else v.toarray() for v in found]
        for other in dense[1:]:
            np.testing.assert_allclose(dense[0], other, rtol=1e-3, atol=1e-4)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert orders.main(["--nnz", "300", "--families", "banded", "--shapes", "A A P", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "| banded: A A P |" in out
    assert "geometric mean" in out
    with pytest.raises(SystemExit):
        orders.main(["--families", "nothing"])
    with pytest.raises(SystemExit):
        orders.main(["--shapes", "A B"])
