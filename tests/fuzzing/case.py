# SPDX-License-Identifier: Apache-2.0
"""Cases: what is run, what is expected, and how a result is judged.

A front draws cases. A case knows how to run itself, which smaller cases there are, and the script that shows it.
`CodeCase` serves fronts whose cases are a few statements over operands; others bring their own class.
"""

from __future__ import annotations

import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from fuzzing.values import PRELUDE, Value, helpers, literal
from sparsetir.errors import SparseTIRError

#: outcomes of a case, in the order of the table
OUTCOMES = ("right", "refused", "wrong", "crashed", "unclear", "known")


@dataclass(frozen=True)
class Finding:
    """Description of a wrong, crashed or unclear case.

    Parameters
    ----------
    outcome : str
        wrong (a result), unclear (an error that is not the package's), or crashed (the process ended or hung).
    label : str
        What findings of one cause have in common.
    detail : str
        For the reader: expected and got, or the traceback.
    """

    outcome: str
    label: str
    detail: str


class Case(ABC):
    """One case of a front. It is pickled to reach other processes."""

    @abstractmethod
    def run(self) -> Finding | None:
        """Run it; raise a `SparseTIRError` where the package refuses it."""

    @abstractmethod
    def smaller(self) -> Iterator[Case]:
        """Cases with one part less, large parts first."""

    @abstractmethod
    def script(self) -> str:
        """A stand-alone script that prints expected and got, and exits with status 1 while the fault is there."""

    def short_script(self) -> str:
        """A script that is made without running the case, where that ends the process."""
        return self.script()


class Skip(Exception):
    """The inputs of a case prove nothing: it is not counted."""


class Front(ABC):
    """A source of cases.

    Attributes
    ----------
    name : str
    groups : int
        How many groups of cases the tests run.
    optimised : bool
        Whether LLVM always optimises.
    fenced : bool
        Whether some groups have their arrays between unreadable pages.
    patience : int
        A group ends when so many cases were refused and none was right: what is refused is the same in all.
    """

    name: str
    groups: int = 5
    optimised = False
    fenced = True
    patience = 3

    @abstractmethod
    def draw(self, rng: Random) -> Iterator[Case]:
        """A group of cases that share what is expensive: a program, an expression, a model."""


@dataclass(frozen=True)
class Expected:
    """An expected result and how far each element may be from it."""

    values: Any
    slack: Any = 0.0


# ---------------------------------------------------------------------------------------------- judging


def plain(result: Any) -> Any:
    """A result as a dense array."""
    if hasattr(result, "detach"):
        result = result.detach()
        if str(result.layout) != "torch.strided" and result.is_complex():  # to_dense multiplies by 1: inf * 0j is nan
            entries = result.to_sparse_coo().coalesce()
            whole = np.zeros(result.shape, entries.values().numpy().dtype)
            whole[tuple(entries.indices().numpy())] = entries.values().numpy()
            return whole
        result = result.to_dense() if str(result.layout) != "torch.strided" else result
        result = result.float() if str(result.dtype) == "torch.bfloat16" else result
        return result.numpy()
    if hasattr(result, "toarray"):
        return (result.astype("float32") if str(result.dtype) in ("float16", "bfloat16") else result).toarray()
    if hasattr(result, "to_dense"):
        return result.to_dense()
    if hasattr(result, "coords") and hasattr(result, "values"):
        whole = np.zeros(result.shape, result.values.dtype)
        np.add.at(whole, tuple(result.coords), result.values)
        return whole
    return np.asarray(result.numpy() if hasattr(result, "numpy") else result)


def difference(got: Any, expected: Expected) -> str:
    """Describe the first difference, or return "": NaN equals NaN, infinities must agree, signs of zero need not."""
    want = np.asarray(expected.values)
    if got.shape != want.shape:
        return f"the shape is {got.shape}, expected {want.shape}"
    wide = np.complex128 if "c" in (want.dtype.kind, got.dtype.kind) else np.float64
    exact = want.dtype.kind in "iub" and got.dtype.kind in "iub"
    one, other = (got, want) if exact else (got.astype(wide), want.astype(wide))
    with np.errstate(all="ignore"):
        near = one == other if exact else (one == other) | (np.abs(one - other) <= expected.slack)
    right = near if exact else near | (np.isnan(one) & np.isnan(other))
    if right.all():
        return ""
    at = tuple(int(n) for n in np.argwhere(~right)[0])
    return f"element {list(at)} is {got[at]}, expected {want[at]} ({int((~right).sum())} of {right.size} differ)"


def unclear(error: BaseException, where: str = "") -> Finding:
    """An error that is not the package's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "sparsetir" in f.filename.split("/")[-3:]]
    near = f" in {frames[-1].name}" if frames else ""
    text = " ".join(str(error).split())
    words = "".join(c for c in text if not c.isdigit())[:60]
    lines = "".join(traceback.format_exception(error)).splitlines()
    detail = "\n".join([line for line in lines if 'File "<unknown>"' not in line][-30:])
    return Finding("unclear", f"{where}{type(error).__name__}{near}: {words}", detail)


# ---------------------------------------------------------------------------------------------- statements


class CodeFront(Front):
    """A front whose cases are statements over operands; the result is what `got` names."""

    def code(self, case: CodeCase) -> list[str]:
        """The statements."""
        return list(case.facts["code"])

    @abstractmethod
    def expected(self, case: CodeCase) -> Expected | None:
        """The expected result; None where only the class of errors is judged."""

    def simpler(self, case: CodeCase) -> Iterator[Mapping[str, Any]]:
        """Facts with one part less."""
        return iter(())

    def label(self, case: CodeCase) -> str:
        """Return the label that wrong results of one cause share."""
        return "not finite" if is_special(case) else ""


@dataclass(frozen=True, eq=False)
class CodeCase(Case):
    """Operands by name, and the facts that the front's statements and oracle read."""

    front: CodeFront
    values: dict[str, Value]
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Finding | None:
        expected, names = self.front.expected(self), self.made()
        try:
            exec(compile("\n".join(self.front.code(self)), "<case>", "exec"), names)
            got = names["got"]
        except SparseTIRError:
            raise
        except Exception as error:
            return unclear(error)
        if expected is None:
            return None
        try:
            shown = plain(got)
        except Exception as error:
            return unclear(error, "in the result: ")
        text = difference(shown, expected)
        return Finding("wrong", self.front.label(self), text) if text else None

    def made(self) -> dict[str, Any]:
        """The operands and the functions of the prelude by name."""
        return {**helpers(), **{name: value.make() for name, value in self.values.items()}}

    def smaller(self) -> Iterator[CodeCase]:
        for facts in self.front.simpler(self):
            used = {name: self.values[name] for name in facts.get("operands", self.values)}
            yield replace(self, facts=dict(facts), values=used)
        for letter in dict.fromkeys("".join(v.letters for v in self.values.values())):
            length = max(v.shape[v.letters.index(letter)] for v in self.values.values() if letter in v.letters)
            for at in range(length if length > 1 else 0):
                yield replace(self, values={n: v.cut(letter, at) for n, v in self.values.items()})
        for name, value in self.values.items():
            yield from (replace(self, values={**self.values, name: other}) for other in value.smaller())
        for dtype in ("float32", "float64"):
            if {v.dtype for v in self.values.values()} - {"float32", dtype}:
                yield replace(self, values={n: v.cast(dtype) for n, v in self.values.items()})

    def script(self) -> str:
        lines = [f"{name} = {value.source()}" for name, value in self.values.items()]
        expected = self.front.expected(self)
        if expected is None:
            return code_script(lines + self.front.code(self))
        want = np.asarray(expected.values)
        slack = np.broadcast_to(np.asarray(expected.slack, np.float64), want.shape)
        lines += self.front.code(self)
        lines += [f"want, slack = {literal(want)}.reshape({want.shape}), {literal(np.array(slack))}"]
        return code_script([*lines, COMPARE])


def is_special(case: CodeCase) -> bool:
    """Return whether an operand has an infinity or NaN."""
    with np.errstate(all="ignore"):
        return not all(np.isfinite(v.data.astype(np.complex128)).all() for v in case.values.values())


COMPARE = """
got = plain(got)
print("expected", want.tolist())
print("got     ", got.tolist())
with np.errstate(all="ignore"):
    near = lambda: (got == want) | (abs(got - want) <= slack) | ((got != got) & (want != want))
    right = got.shape == want.shape and near().all()
raise SystemExit(not right)"""

PLAIN = "\n" + inspect.getsource(plain).replace("(result: Any) -> Any", "(result)")


def code_script(lines: list[str]) -> str:
    """A script of statements; an error that is not the package's is the fault."""
    body = "\n".join(f"    {line}" for text in lines for line in text.split("\n"))
    handlers = (
        "except sparsetir.errors.SparseTIRError as error:\n    print('refused:', error)\n"
        "except Exception as error:\n    print('expected a result or a SparseTIRError')\n"
        "    print('got     ', type(error).__name__, error)\n    raise SystemExit(1) from error\n"
    )
    return f"{PRELUDE}{PLAIN}\ntry:\n{body}\n{handlers}"


__all__ = [
    "OUTCOMES", "Case", "CodeCase", "CodeFront", "Expected", "Finding", "Front", "Skip", "code_script", "difference",
    "is_special",    "plain", "unclear",
]  # fmt: skip
