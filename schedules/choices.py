# SPDX-License-Identifier: Apache-2.0
"""The open choices of the row sketch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sparsetir.errors import ScheduleError
from sparsetir.scalars import as_whole
from sparsetir.threads import get_num_threads

TILES = (8, 16, 32, 64, 128)
CHUNKS_PER_THREAD = (1, 2, 4, 8, 16, 32)
UNROLLS = (1, 2, 4, 8)
PREFETCHES = (0, 4, 8, 16, 32)
PANELS = (32, 64, 128, 256)
LANES = (0, 4, 8)


@dataclass(frozen=True)
class Choices:
    """One point of the row sketch's space.

    Parameters
    ----------
    tile : int
        Elements of a row kept in registers, of the result or of what several sums share; a power of two.
    chunks : int
        Parallel pieces with equal numbers of nonzeros; 0 runs on one core. By default one for each thread: TVM gives
        every thread the same number of pieces.
    unroll : int
        Nonzeros per step of the innermost ragged loop.
    prefetch : int
        How many nonzeros ahead gathered rows are fetched; 0 leaves it to the hardware.
    stream : int
        1 writes results past the caches: for those that are larger than the caches anyway.
    carry : int
        1 splits rows that reach into several chunks, where sums may be reordered; 0 keeps rows whole.
    panel : int
        Columns, a power of two, of a gathered operand that are packed for all rows before the next; 0 packs only
        operands whose columns are not their last dimension. Tiles are cut to it.
    lanes : int
        Nonzeros of a ragged row that are summed side by side, the last of them under a mask; a power of two. 0 leaves
        the loop to LLVM.
    """

    tile: int = 64
    chunks: int = field(default_factory=get_num_threads)
    unroll: int = 1
    prefetch: int = 0
    stream: int = 0
    carry: int = 0
    panel: int = 0
    lanes: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(as_whole(value), int):
                raise ScheduleError(f"{name} must be a whole number, found {value!r}")
            object.__setattr__(self, name, as_whole(value))
        if self.tile < 1 or self.tile & (self.tile - 1):
            raise ScheduleError(f"tile must be a power of two, found {self.tile}")
        if self.stream not in (0, 1):
            raise ScheduleError(f"stream must be 0 or 1, found {self.stream}")
        if self.panel < 0 or self.panel & (self.panel - 1):
            raise ScheduleError(f"panel must be 0 or a power of two, found {self.panel}")
        if self.chunks < 0 or self.unroll < 1 or self.prefetch < 0:
            raise ScheduleError(f"chunks and prefetch must not be negative and unroll at least 1, found {self}")
        if self.carry not in (0, 1):
            raise ScheduleError(f"carry must be 0 or 1, found {self.carry!r}")
        if self.lanes < 0 or self.lanes & (self.lanes - 1) or self.lanes == 1:
            raise ScheduleError(f"lanes must be 0 or a power of two from 2 on, found {self.lanes}")

    def as_dict(self) -> dict[str, int]:
        """Names and values, for records."""
        return dict(vars(self))

    def changed(self, **values: int) -> Choices:
        """With other values for some."""
        return replace(self, **values)

    @staticmethod
    def space(*, threads: int, feat: int | None = None) -> dict[str, tuple[int, ...]]:
        """Values worth trying for each choice.

        Parameters
        ----------
        threads : int
            Chunks are multiples of it, and 0.
        feat : int, optional
            Length of an output row: wider tiles are left out.

        Returns
        -------
        dict of str to tuple of int

        Examples
        --------
        >>> Choices.space(threads=2, feat=32)["tile"]
        (8, 16, 32)
        """
        tiles = tuple(tile for tile in TILES if feat is None or tile <= feat) or TILES[:1]
        chunks = {0, *(threads * pieces for pieces in CHUNKS_PER_THREAD)}
        return {
            "tile": tiles,
            "chunks": tuple(sorted(chunks)),
            "unroll": UNROLLS,
            "prefetch": PREFETCHES,
            "stream": (0, 1),
            "panel": (0, *(panel for panel in PANELS if feat is None or panel < feat)),
            "lanes": LANES,
        }
