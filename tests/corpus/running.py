# SPDX-License-Identifier: Apache-2.0
"""Draw a case's inputs, run a kernel on them and compare with the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from corpus.case import Arguments, Case
from sparsetir.ir.views import decode


def draw(case: Case, kind: str, dtype: str, idtype: str) -> Arguments:
    """The inputs of `case` for a structure of `kind`, the same in every run."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name}-{kind}".encode()))
    return case.inputs(rng, kind, dtype, idtype)


def copied(args: Arguments) -> Arguments:
    """Arguments a call may write to."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in args.items()}


def run(case: Case, kernel: Callable[..., Any], args: Arguments) -> list[np.ndarray]:
    """Call `kernel`: the outputs it returns and those it updates in place, in the order of the script."""
    held = copied(args)
    out = kernel(**held)
    returned = iter(out if isinstance(out, tuple) else (out,))
    return [held[name] if name in held else next(returned) for name in case.output_names]


def check(case: Case, func: Any, dtype: str, found: Sequence[np.ndarray], args: Arguments) -> None:
    """Compare outputs with the oracle: type, shape and values."""
    tolerance, params = case.tolerance_for(dtype), decode(func).params
    for name, got, want in zip(case.output_names, found, case.expected(args), strict=True):
        kept = np.dtype(str(params[name].ty.dtype))
        assert isinstance(got, np.ndarray), f"{name} is a {type(got).__name__}"
        assert got.dtype == kept, f"{name} is {got.dtype}, the program says {kept}"
        assert got.shape == want.shape, f"{name} has shape {got.shape}, expected {want.shape}"
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance, err_msg=name)
