# SPDX-License-Identifier: Apache-2.0
"""The rates of a machine that a cost model goes by: amounts become times on them, so that machines compare."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetir.machine import last_cache, private_cache


@dataclass(frozen=True)
class Rates:
    """What a core does in a second; by default one of a usual server.

    Parameters
    ----------
    peak : float
        Floating-point operations on float32, in full vectors.
    private, last, memory : float
        Bytes from the core's own caches, the last cache, and the memory.
    """

    peak: float = 100e9
    private: float = 200e9
    last: float = 60e9
    memory: float = 25e9

    def of(self, held: float) -> float:
        """Bytes a second of what is so large and used again and again."""
        return self.private if held <= private_cache() else self.last if held <= last_cache() else self.memory


USUAL = Rates()

__all__ = ["USUAL", "Rates"]
