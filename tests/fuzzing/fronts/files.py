# SPDX-License-Identifier: Apache-2.0
"""Mutated files of every kind and packing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from fuzzing.case import Case, Finding, Front
from fuzzing.loaders import drawn_file, outcome
from fuzzing.values import parts
from sparsetir.errors import FileFormatError


@dataclass(frozen=True)
class FileCase(Case):
    """The name and the bytes of a file."""

    name: str
    data: bytes

    def run(self) -> Finding | None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, self.name)
            path.write_bytes(self.data)
            text = outcome(path).replace(folder, "")
        if text == "refused":
            raise FileFormatError("as it should be")
        if not text.startswith("wrong"):
            return None
        kind = "wrong" if "Error" not in text.split(":")[1] else "unclear"
        return Finding(kind, "".join(c for c in text if not c.isdigit())[:60], text)

    def smaller(self) -> Iterator[Case]:
        lines = self.data.split(b"\n")
        for part in parts(len(lines)):
            yield replace(self, data=b"\n".join(lines[: part.start] + lines[part.stop :]))
        for part in parts(min(len(self.data), 400)):
            yield replace(self, data=self.data[: part.start] + self.data[part.stop :])

    def script(self) -> str:
        return f"""
import tempfile, sys
from pathlib import Path
import sparsetir

path = Path(tempfile.mkdtemp(), {self.name!r})
path.write_bytes({self.data!r})
print("expected a sound matrix, or a SparseTIRError that names the file")
try:
    print("got     ", repr(sparsetir.read(path)))
except sparsetir.errors.SparseTIRError as error:
    print("got     ", error)
    sys.exit(str(path) not in str(error))
sys.exit(1)
"""


class Files(Front):
    """`sparsetir.read`."""

    name, groups, patience = "files", 1, 1 << 30

    def draw(self, rng: Random) -> Iterator[Case]:
        for _ in range(100):
            yield FileCase(*drawn_file(rng))


__all__ = ["Files"]
