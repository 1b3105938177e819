# SPDX-License-Identifier: Apache-2.0
"""What a schedule may not do is refused; proofs about loops and copies."""
