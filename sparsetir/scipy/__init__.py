# SPDX-License-Identifier: Apache-2.0
"""Run the products and sums of scipy's sparse matrices on compiled kernels, without a change to the program.

>>> import numpy as np, scipy.sparse as sp
>>> from sparsetir.scipy import accelerate
>>> A = sp.csr_array(np.eye(3))
>>> with accelerate():
...     (A @ np.ones(3)).tolist()
[1.0, 1.0, 1.0]

``python -m sparsetir.scipy script.py`` runs a whole script this way. TVM is not imported into the process: kernels are
compiled by another one, of the lowest priority, and loaded as C libraries. Until a kernel is there, and wherever it
proves slower, scipy computes the result.
"""

from __future__ import annotations

from types import TracebackType

from sparsetir.scipy import methods
from sparsetir.scipy.selection import TimedSelection
from sparsetir.utils.caches import ForkLock

_lock = ForkLock()
_active: list[accelerate] = []


class accelerate:
    """Replace methods of scipy's csr and csc classes by compiled kernels, from the call until `restore`.

    ``A @ B``, ``B @ A``, ``A.dot(B)``, ``A * B`` of matrices, ``A + B``, ``A - B`` and ``A.multiply(B)`` of
    `csr_array`, `csr_matrix`, `csc_array` and `csc_matrix` are replaced, and with them what scipy, scikit-learn,
    networkx and others compute by these. Results have scipy's classes, shapes, dtypes and index dtypes, and errors are
    scipy's. Sums of floating-point numbers may be rounded differently, because they are added in another order.

    Kernels exist for float32 and float64 with int32 or int64 indices; everything else, and every operand with few
    entries, goes to scipy. For each operation and size the first calls are timed, and a kernel that is not faster than
    scipy is not used again.

    Parameters
    ----------
    threads : int, optional
        Threads of a kernel; by default one for each core that the process may use.
    min_entries : int
        Operands with fewer stored entries go to scipy.
    wait : bool
        Compile a kernel when it is first needed, and wait for it; by default scipy computes in the meantime.

    Raises
    ------
    ArgumentError
        An argument is out of its range.

    Examples
    --------
    As a context, or for the rest of the program:

    >>> import numpy as np, scipy.sparse as sp
    >>> from sparsetir.scipy import accelerate
    >>> A = sp.eye_array(4, format="csr")
    >>> with accelerate():
    ...     (A + A).sum().item()
    8.0
    >>> acceleration = accelerate(threads=1)
    >>> (A @ A).nnz
    4
    >>> acceleration.restore()
    """

    def __init__(self, *, threads: int | None = None, min_entries: int = 8192, wait: bool = False) -> None:
        self.selection = TimedSelection(threads=threads, min_entries=min_entries, wait=wait)
        self._start()

    def _start(self) -> None:
        with _lock:
            if self not in _active:
                _active.append(self)
                methods.install(self.selection)

    def restore(self) -> None:
        """Put scipy's methods back, or those of an acceleration that is still active. Calling it again does nothing."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            self.selection.save()
            if _active:
                methods.install(_active[-1].selection)
            else:
                methods.remove()

    def report(self) -> str:
        """Return a table of the timed operations: calls, best times of scipy and of the kernel, the choice."""
        return self.selection.report()

    def __enter__(self) -> accelerate:
        self._start()  # again, where it was left before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


__all__ = ["accelerate"]
