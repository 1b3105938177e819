# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions of processors as TVM tensor intrinsics.

Importing the package registers each intrinsic of the `TABLE` as ``sparsetir.NAME``, so that
``sch.tensorize(loop, "sparsetir.dot_u8s8_512")`` replaces the loops that it stands for:

>>> from sparsetir import intrin
>>> intrin.get("dot_bf16_512").operand_shapes
((2,), (16, 2), (16,))

`available` lists those of a target, `Intrinsic.compute` is their meaning in numpy.
"""

from __future__ import annotations

from typing import Any

from sparsetir.intrin.table import TABLE, Intrinsic, get
from sparsetir.intrin.tensor import register


def available(target: Any) -> list[Intrinsic]:
    """Return the intrinsics whose features a target has.

    Parameters
    ----------
    target : tvm.target.Target
        An LLVM target.

    Returns
    -------
    list of Intrinsic

    Examples
    --------
    >>> import tvm
    >>> from sparsetir import intrin
    >>> target = tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake"})
    >>> [unit.name for unit in intrin.available(target)]
    ['dot_u8s8_512', 'dot_s8u8_512', 'dot_u8s8_256', 'dot_s8u8_256']
    """
    from tvm.target import codegen

    return [unit for unit in TABLE if all(codegen.target_has_features(feature, target) for feature in unit.features)]


for _unit in TABLE:
    register(_unit)


__all__ = ["TABLE", "Intrinsic", "available", "get"]
