# SPDX-License-Identifier: Apache-2.0
"""Random programs under random schedules and formats, and random histories of calls, each with an oracle of its own.

`python tests/fuzzing/programs.py --help` and `python tests/fuzzing/histories.py --help` run them at any size.
"""
