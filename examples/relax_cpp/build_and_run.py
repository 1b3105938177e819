# SPDX-License-Identifier: Apache-2.0
"""A pruned network, compiled and saved here, run by a C++ program that has no Python: main.cc beside this file."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import tvm.libinfo
import tvm_ffi.libinfo
from tvm.relax.frontend import nn

import sparsetir.relax
from sparsetir.relax.nn import SparseLinear

BATCH, FEATURES, HIDDEN, CLASSES = 5, 256, 512, 10


class Network(nn.Module):
    def __init__(self, first: sp.csr_array, bias: np.ndarray, second: sp.csr_array) -> None:
        self.first = SparseLinear.from_scipy(first, bias)
        self.second = SparseLinear.from_scipy(second)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.second(nn.op.relu(self.first(x)))


def compile_cc(program: Path) -> None:
    """Compile main.cc with the headers and libraries of the installed wheels."""
    headers = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    libraries = [Path(tvm.libinfo.find_libtvm_runtime()), Path(tvm_ffi.libinfo.find_libtvm_ffi())]
    # No symbol of libtvm_runtime is named in main.cc; the linker is not to leave it out for that.
    linked = ["-Wl,--no-as-needed", *map(str, libraries), *(f"-Wl,-rpath,{path.parent}" for path in libraries)]
    source = Path(__file__).with_name("main.cc")
    subprocess.run(["g++", "-std=c++17", "-O0", str(source), *headers, *linked, "-o", str(program)], check=True)


def main() -> None:
    rng = np.random.default_rng(0)
    first = sp.random_array((HIDDEN, FEATURES), density=0.1, format="csr", dtype="float32", rng=rng)
    second = sp.random_array((CLASSES, HIDDEN), density=0.3, format="csr", dtype="float32", rng=rng)
    bias, x = rng.standard_normal(HIDDEN, "float32"), rng.standard_normal((BATCH, FEATURES), "float32")

    spec = {"forward": {"x": nn.spec.Tensor(["batch", FEATURES], "float32")}}
    mod, params = Network(first, bias, second).export_tvm(spec)
    model = sparsetir.relax.compile_model(mod, params=dict(params))

    with tempfile.TemporaryDirectory() as folder:
        library = model.save(Path(folder) / "model.so")
        program, given, result = (Path(folder) / name for name in ("main", "x.bin", "y.bin"))
        compile_cc(program)
        x.tofile(given)
        command = [program, library, given, BATCH, FEATURES, result]
        done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
        y = np.fromfile(result, "float32").reshape(BATCH, CLASSES)
    np.testing.assert_allclose(y, np.maximum(x @ first.T + bias, 0) @ second.T, rtol=1e-4, atol=1e-4)
    print(done.stdout, end="")
    print(f"C++ computed {y.shape[0]} x {y.shape[1]} results; they are those of numpy")


if __name__ == "__main__":
    main()
