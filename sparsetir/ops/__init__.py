# SPDX-License-Identifier: Apache-2.0
"""Ready programs of the dialect: `dense_output`, and `sparse_output` whose pattern is computed."""

from sparsetir.ops.dense_output import *  # noqa: F403
from sparsetir.ops.dense_output import FORMATS as FORMATS
from sparsetir.ops.dense_output import __all__ as __all__
