# SPDX-License-Identifier: Apache-2.0
"""Errors a user can meet. Each is also the fitting builtin, so ``except ValueError`` works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_latest: ContextVar[SparseTIRError | None] = ContextVar("_latest", default=None)


class SparseTIRError(Exception):
    """Base of every error raised on purpose by this package."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _latest.set(self)


class ScriptWarning(UserWarning):
    """A legal program that hardly means what it says."""


class UpstreamWarning(UserWarning):
    """A program has the shape of one for upstream SparseTIR, where it means something else; see docs/upstream.md."""


@contextmanager
def own_errors() -> Iterator[None]:
    """Give an error raised inside a TVM pass its class back: crossing TVM turns it into a RuntimeError."""
    _latest.set(None)
    try:
        yield
    except SparseTIRError:
        raise
    except Exception as error:
        own = _latest.get()
        if own is not None and str(own) in str(error):
            raise own from None
        raise


class ScriptError(SparseTIRError, SyntaxError):
    """A program text does not follow the dialect; the message quotes the source line."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class VerifyError(SparseTIRError, ValueError):
    """A program breaks a rule of its stage.

    Parameters
    ----------
    message : str
        What was expected, what was found, what to try.
    construct : str
        Name of the axis, buffer or iteration at fault ("" if none).
    """

    def __init__(self, message: str, construct: str = "") -> None:
        super().__init__(message)
        self.construct = construct


class ArgumentError(SparseTIRError, ValueError):
    """A kernel was called with an argument of wrong shape, size or structure."""


class OffsetError(ArgumentError):
    """An array of a call has more elements than the offsets of a kernel can count."""


class ArgumentTypeError(SparseTIRError, TypeError):
    """A kernel was called with an argument of wrong type or dtype, or with a wrong name."""


class StructureError(ArgumentError):
    """The index arrays of a sparse argument are not what the axes tree promises."""


class LoweringError(SparseTIRError, NotImplementedError):
    """A legal program asks for something the compiler does not do."""


class ScheduleError(SparseTIRError, ValueError):
    """A schedule primitive is not legal here; the message gives the reason."""


class FileFormatError(SparseTIRError, ValueError):
    """A matrix or tensor file cannot be read as its format."""


class MissingFileError(SparseTIRError, FileNotFoundError):
    """There is no such file."""


class WriteError(SparseTIRError, OSError):
    """A file cannot be written, as on a full disk."""


class TuningError(SparseTIRError, RuntimeError):
    """A search could not produce a kernel."""


class ExecutorLostError(TuningError):
    """The executor of a search takes no more jobs, or its workers do not answer or are not alike."""
