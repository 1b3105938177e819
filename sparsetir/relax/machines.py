# SPDX-License-Identifier: Apache-2.0
"""A function of a compiled module for calls from any thread."""

from __future__ import annotations

import threading
from typing import Any

import tvm
from tvm import relax


class Machines:
    """A function of a module, run by another machine in each thread: a machine has the registers of one call.

    Parameters
    ----------
    library : VMExecutable or Module
    name : str
        Of the function.
    machine : VirtualMachine, optional
        That of the thread that makes this one, where there is one.
    """

    def __init__(self, library: Any, name: str, machine: relax.VirtualMachine | None = None) -> None:
        self.library, self.name = library, name
        self._own = threading.local()
        if machine is not None:
            self._own.function = machine[name]

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        if not hasattr(self._own, "function"):
            self._own.function = relax.VirtualMachine(self.library, tvm.cpu())[self.name]
        return self._own.function(*args)


__all__ = ["Machines"]
