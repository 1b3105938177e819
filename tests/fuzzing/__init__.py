# SPDX-License-Identifier: Apache-2.0
"""A fuzzer of the whole package: drawn cases on several fronts, each judged by an oracle of its own.

    python -m tests.fuzzing --seconds 600 --seed 1

runs all fronts, reduces what it finds to stand-alone scripts, and prints a table; see docs/reliability.md. A case is
data: `case.Case` runs it, names smaller ones and prints its script; the fronts in `fronts` draw them. `child` runs
groups of cases in a process that may crash, `command` watches it, `minimise` reduces.
"""
