# SPDX-License-Identifier: Apache-2.0
"""Errors a user can meet. Each is also the fitting builtin, so ``except ValueError`` works."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

Makes = TypeVar("Makes", bound=Callable[..., Any])

_latest: ContextVar[SparseTIRError | None] = ContextVar("_latest", default=None)


class SparseTIRError(Exception):
    """Base of every error raised on purpose by this package."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _latest.set(self)


class ScriptWarning(UserWarning):
    """A legal program that is probably a mistake."""


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


class OutOfRangeError(ArgumentError, IndexError):
    """An index lies outside of a tensor."""


class ArgumentTypeError(SparseTIRError, TypeError):
    """A kernel was called with an argument of wrong type or dtype, or with a wrong name."""


def checks_keywords(maker: Makes, owner: str | None = None) -> Makes:
    """Make a function, or the constructor of a class, name a keyword that it does not have, and the closest it has."""
    owner = owner or maker.__name__
    if not isinstance(maker, type):
        return _checked(maker, owner)  # type: ignore[return-value]
    if "__init__" in vars(maker):
        setattr(maker, "__init__", _checked(vars(maker)["__init__"], owner))  # noqa: B010 - mypy refuses it
    return maker


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError:
            # Only a failed call pays for the signature: searches make thousands of objects.
            taken = list(inspect.signature(function).parameters.values())
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
                raise
            accepted = [p.name for p in taken if p.name != "self" and p.kind is not p.POSITIONAL_ONLY]
            unknown = next((keyword for keyword in keywords if keyword not in accepted), None)
            if unknown is None:
                raise
            raise ArgumentTypeError(unknown_keyword(name, unknown, accepted)) from None

    return call


def unknown_keyword(owner: str, unknown: str, accepted: Sequence[str]) -> str:
    """Say that there is no such keyword, and which are closest."""
    close = difflib.get_close_matches(unknown, accepted)
    hint = f"Did you mean {' or '.join(close)}?" if close else "Leave it out."
    listed = f"one of {', '.join(accepted)}" if accepted else "no keywords"
    return f"{unknown}: expected {listed}, got a name that {owner} does not have. {hint}"


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
