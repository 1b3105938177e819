# SPDX-License-Identifier: Apache-2.0
"""
Export to C
===========

``kernel.export`` writes a shared library and a header that need neither Python nor TVM. Here a C program takes five
hundred steps of the heat equation with an exported SpMV. It needs a C compiler.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from matplotlib import pyplot

import sparsetir

SIDE = max(24, int(96 * float(os.environ.get("SPARSETIR_GALLERY_SCALE", 1))))
STEPS = 500
folder = tempfile.TemporaryDirectory()
work = Path(folder.name)

# %%
# The library
# -----------

kernel = sparsetir.build(sparsetir.ops.spmv())
header = kernel.export(work / "libspmv.so")
print("\n".join(line for line in header.read_text().splitlines() if line.startswith(("int", "const", "    "))))

# %%
# The program
# -----------
# It reads the arrays of a CSR matrix and a vector, and multiplies again and again.

PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include "libspmv.h"

static void *load(const char *path, size_t bytes) {
  void *memory = malloc(bytes);
  FILE *file = fopen(path, "rb");
  if (!file || fread(memory, 1, bytes, file) != bytes) exit(2);
  fclose(file);
  return memory;
}

int main(int argc, char **argv) {
  int n = atoi(argv[1]), nnz = atoi(argv[2]), steps = atoi(argv[3]);
  int32_t *indptr = load("indptr", (n + 1) * 4), *indices = load("indices", nnz * 4);
  float *values = load("values", nnz * 4), *x = load("x", n * 4), *y = malloc(n * 4);
  for (int step = 0; step < steps; ++step) {
    if (spmv(values, x, y, indptr, indices, n, n, nnz)) {
      fprintf(stderr, "%s\n", spmv_last_error());
      return 1;
    }
    float *last = x; x = y; y = last;
  }
  FILE *out = fopen("out", "wb");
  fwrite(x, 4, n, out);
  return fclose(out);
}
"""

# %%
# Build and run it
# ----------------
# The matrix is one explicit step on a square plate with cold edges; two hot spots cool down.

line = sp.diags_array([np.ones(SIDE - 1), -2 * np.ones(SIDE), np.ones(SIDE - 1)], offsets=[-1, 0, 1])
identity = sp.eye_array(SIDE)
step = sp.csr_array(
    sp.eye_array(SIDE * SIDE) + 0.2 * (sp.kron(line, identity) + sp.kron(identity, line)), dtype="float32"
)
start = np.zeros((SIDE, SIDE), "float32")
start[SIDE // 4 : SIDE // 2, SIDE // 4 : SIDE // 3] = 1
start[SIDE // 2 : -SIDE // 8, SIDE // 2 : -SIDE // 4] = 1

for name, array in {"indptr": step.indptr, "indices": step.indices, "values": step.data, "x": start}.items():
    array.tofile(work / name)
(work / "main.c").write_text(PROGRAM)
compiler = shutil.which("cc") or "cc"
subprocess.run([compiler, "main.c", "-L.", "-lspmv", "-Wl,-rpath,.", "-o", "main"], cwd=work, check=True)
subprocess.run(["./main", str(SIDE * SIDE), str(step.nnz), str(STEPS)], cwd=work, check=True)

end = np.fromfile(work / "out", "float32").reshape(SIDE, SIDE)
folder.cleanup()
expected = start.ravel()
for _ in range(STEPS):
    expected = step @ expected
print("same as scipy:", np.allclose(end.ravel(), expected, rtol=1e-4, atol=1e-6))

# %%
# Before and after
# ----------------

figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for axes, field, title in zip(panels, (start, end), ("at the start", f"after {STEPS} steps in C"), strict=True):
    image = axes.imshow(field, cmap="inferno", vmin=0, vmax=1)
    axes.set(title=title, xticks=[], yticks=[])
figure.colorbar(image, ax=panels, label="temperature")
pyplot.show()
