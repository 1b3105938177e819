# SPDX-License-Identifier: Apache-2.0
"""Random programs of the dialect under random schedules and formats, compared with a numpy oracle of their own.

`python tests/fuzzing/programs.py --help` runs them at any size.
"""
