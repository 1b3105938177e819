# SPDX-License-Identifier: Apache-2.0
"""Workers that measure candidates: local processes, remote executors, TVM RPC."""
