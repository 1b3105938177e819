# SPDX-License-Identifier: Apache-2.0
"""Python with this folder on its path has no torch: loading it takes seconds, and TVM does where it is installed."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
