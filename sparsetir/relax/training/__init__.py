# SPDX-License-Identifier: Apache-2.0
"""Training of Relax models: step, trainer, losses, optimizers, layers."""
