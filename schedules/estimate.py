# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds of choices: what moves between the memory and a core, at the rates of a machine's profile.

The model is a roofline of the gathered rows and the results. Rows of a dense operand that are read through an index
array come from the largest effective level within the private cache if they were read a short time ago, and from
where the whole operand lies otherwise. In a panel the operand is narrower, but it is copied once, the index array is
read once for each panel, and results are written in pieces. Arithmetic is the same for all choices and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparsetir.ir.effects import Arrays, Usage, known, share_of_new
from sparsetir.utils.machine import MachineProfile, private_cache


def predicted_seconds(
    usage: Usage,
    arrays: Arrays,
    results: Iterable[np.ndarray],
    profile: MachineProfile,
    *,
    panel: int = 0,
    prefetch: int = 0,
) -> float:
    """Return the seconds that one core takes for the gathered rows and the results of a program.

    Parameters
    ----------
    usage : Usage
    arrays : mapping of str to ndarray
        Arguments by parameter name.
    results : iterable of ndarray
    profile : MachineProfile
    panel : int
        Columns of a packed panel; 0 leaves operands as they are.
    prefetch : int
        Distance in entries.
    """
    near = near_bytes(profile)
    seconds = 0.0
    for indices, operand, rows in known(usage.gathers, arrays):
        row = operand.nbytes // max(rows, 1)
        read = min(panel * operand.itemsize, row) if panel else row
        seconds += row / max(read, 1) * gathered_seconds(indices, rows, read, profile, near, prefetch)
        seconds += 2 * operand.nbytes / profile.store if panel else 0.0
    for result in results:
        if panel and result.nbytes:
            piece = panel * result.itemsize
            # A piece of a row is read into the caches before it is written.
            seconds += 2 * result.nbytes / piece * profile.gather_seconds(piece, result.nbytes)
        elif result.nbytes > near:
            seconds += result.nbytes / profile.store
    return seconds


def gathered_seconds(
    indices: np.ndarray, rows: int, row_bytes: int, profile: MachineProfile, near: int, prefetch: int = 0
) -> float:
    """Return the seconds to read a row for each entry of an index array once."""
    working_set = rows * row_bytes
    far = profile.gather_seconds(row_bytes, working_set, prefetch)
    if working_set <= near or not indices.size:
        return indices.size * far
    new = share_of_new(indices, max(near // max(row_bytes, 1), 1))
    return indices.size * (new * far + (1 - new) * profile.gather_seconds(row_bytes, near, prefetch))


def near_bytes(profile: MachineProfile) -> int:
    """Return the largest effective level of a profile within the core's private cache."""
    private = private_cache()
    return max((level.size for level in profile.levels if 0 < level.size <= private), default=private)


__all__ = ["gathered_seconds", "near_bytes", "predicted_seconds"]
