# SPDX-License-Identifier: Apache-2.0
"""
Reading the three stages
========================

A program goes from iterations over sparse axes (stage I) to blocks over positions (stage II) to loops over flat
arrays (stage III). ``kernel.trace()`` shows it after each pass.
"""

from matplotlib import pyplot

import sparsetir

# %%
# Stage I: what is computed
# -------------------------

kernel = sparsetir.build(sparsetir.ops.spmv())
print(kernel.script(stage=1))

# %%
# Stage II: blocks, and the schedule
# ----------------------------------

print(kernel.script(stage=2, outline=True))

# %%
# Stage III: loops
# ----------------

print(kernel.script(stage=3, outline=True))

# %%
# From one to the next
# --------------------
# The passes that change this program, and how much each one changes.

trace = kernel.trace()
changes = {}
for step in trace.changed:
    lines = trace.diff(step.name).splitlines()
    changes[f"{step.name} ({step.stage})"] = [sum(line.startswith(sign) for line in lines) for sign in "-+"]

figure, axes = pyplot.subplots(figsize=(8, 0.26 * len(changes) + 1), layout="constrained")
removed, added = zip(*changes.values(), strict=True)
axes.barh(list(changes), [-count for count in removed], color="C3", label="lines removed")
axes.barh(list(changes), added, color="C2", label="lines added")
axes.invert_yaxis()
axes.tick_params(axis="y", labelsize="small")
axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
axes.set(title="passes, with the stage they belong to")
axes.legend()
pyplot.show()

# %%
# All differences
# ---------------
# In a notebook a trace is a page with a foldable difference for each pass; ``trace.html(path)`` writes it to a file.

trace
