# SPDX-License-Identifier: Apache-2.0
"""``python -m sparsetir.scipy [--report] SCRIPT [ARGUMENTS]``: run a script or a module (``-m NAME``) accelerated."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from sparsetir.scipy import accelerate


def main(arguments: list[str] | None = None) -> None:
    """Run the script with scipy's methods replaced, and put them back."""
    parser = argparse.ArgumentParser(
        "python -m sparsetir.scipy", description="Run a script with scipy's sparse products on compiled kernels."
    )
    parser.add_argument("--threads", type=int, help="threads of a kernel, by default all cores")
    parser.add_argument("--wait", action="store_true", help="wait for each kernel to be compiled")
    parser.add_argument("--report", action="store_true", help="print the timed operations at the end, to stderr")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT names a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not options.is_module and not Path(options.script).exists():
        parser.error(f"there is no file {options.script}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"argument --threads: expected an integer of at least 1, got {options.threads}")
    sys.argv = [options.script, *options.arguments]
    if options.is_module and not _is_module(options.script):
        parser.error(f"there is no module {options.script}")
    with accelerate(threads=options.threads, wait=options.wait) as acceleration:
        try:
            if options.is_module:  # the first folder of the search path is the current one already
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                _search_beside(Path(options.script))
                runpy.run_path(os.path.abspath(options.script), run_name="__main__")
        finally:
            if options.report:
                print(acceleration.report(), file=sys.stderr)


def _is_module(name: str) -> bool:
    """Return whether Python finds a module; the packages that it stands in are imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False
        raise  # a package imports something else that does not exist
    except (ImportError, ValueError):  # of names such as "." and "__main__"
        return False


def _search_beside(script: Path) -> None:
    """Search modules beside the script instead of in the current folder, as Python does for a script."""
    folder = str(script.resolve().parent)
    if getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        return
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    if not script.is_dir():  # `runpy` adds a folder itself
        sys.path.insert(0, folder)


if __name__ == "__main__":
    main()
