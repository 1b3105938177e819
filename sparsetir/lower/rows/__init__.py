# SPDX-License-Identifier: Apache-2.0
"""Sharing of rows among threads and registers."""
