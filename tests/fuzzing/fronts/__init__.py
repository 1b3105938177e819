# SPDX-License-Identifier: Apache-2.0
"""The fronts by name, in the order of the table."""

from __future__ import annotations

from fuzzing.case import Front
from fuzzing.fronts.bad_arguments import BadArguments
from fuzzing.fronts.einsum import Einsum
from fuzzing.fronts.exported import Exporteds
from fuzzing.fronts.files import Files
from fuzzing.fronts.histories import Histories
from fuzzing.fronts.imports import Imports
from fuzzing.fronts.lazy import Lazies
from fuzzing.fronts.models import Models
from fuzzing.fronts.products import Products
from fuzzing.fronts.programs import Halves, Programs
from fuzzing.fronts.tensors import Tensors
from fuzzing.fronts.torch_ops import TorchOperators

ALL: tuple[Front, ...] = (Programs(), Halves(), Einsum(), Products(), Tensors(), Lazies(), TorchOperators(), Models())
ALL += (Imports(), Histories(), Exporteds(), Files(), BadArguments())
FRONTS: dict[str, Front] = {front.name: front for front in ALL}

__all__ = ["FRONTS"]
