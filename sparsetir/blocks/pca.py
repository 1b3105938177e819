# SPDX-License-Identifier: Apache-2.0
"""Principal components from a Gram matrix, or from a few passes of a block Krylov method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.errors import ArgumentError, ArgumentTypeError

Array = np.ndarray[Any, Any]
MAX_GRAM_FEATURES = 8192  # an eigendecomposition of more takes longer than passes over the matrix
MAX_PASSES = 12
OVERSAMPLING = 10
EPSILON = 1e-10  # of a rounded eigenvalue, relative to the largest
LANCZOS_RATIO = 40  # features for each component from which on Lanczos' method is faster
TOLERANCE = 1e-5  # of a residual, relative to the largest eigenvalue


@dataclass(frozen=True)
class PCA:
    """Principal components, with scikit-learn's names and signs.

    Attributes
    ----------
    components_ : ndarray of float64, shape (k, features)
    explained_variance_, explained_variance_ratio_, singular_values_ : ndarray of float64, shape (k,)
    mean_ : ndarray of float64, shape (features,)
    n_samples_ : int
    """

    components_: Array
    explained_variance_: Array
    explained_variance_ratio_: Array
    singular_values_: Array
    mean_: Array
    n_samples_: int

    @property
    def n_components_(self) -> int:
        return len(self.components_)

    def transform(self, M: Any) -> Array:
        """Return the scores, shape (rows, k), of a matrix with ``@``: blocks, scipy or numpy."""
        return np.asarray(M @ np.ascontiguousarray(self.components_.T)) - self.mean_ @ self.components_.T


def check_components(k: Any, shape: tuple[int, int]) -> int:
    """Validate a number of components, and return it as an int."""
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise ArgumentTypeError(f"k: expected an integer, got {type(k).__name__}. Pass the number of components.")
    if not 1 <= k <= min(shape) or shape[0] < 2:
        raise ArgumentError(f"k: expected 1 to {min(shape)} components of {shape}, got {k}. Choose fewer.")
    return int(k)


def from_gram(gram: Array, mean: Array, rows: int, k: int) -> PCA:
    """Return components from the centred Gram matrix."""
    values, vectors = _largest(gram, k)
    return _sorted(values, vectors, float(np.trace(gram)), mean, rows, k)


def _largest(gram: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest eigenvalues in rising order, and their vectors.

    A few of many are computed by Lanczos' method to the precision of float64. Reducing the whole matrix to three
    diagonals takes twice its time, and many times where other processes keep cores from the threads of BLAS.
    """
    # Importing them takes as long as importing numpy.
    import scipy.linalg
    import scipy.sparse.linalg as solvers

    n = len(gram)
    if k * LANCZOS_RATIO <= n and gram.any():
        start = np.random.default_rng(0).standard_normal((2, n))
        try:
            values, vectors = solvers.eigsh(gram, k, which="LA", v0=start[0])
            # A vector of a value that occurs several times may be missed: the largest of what is left shows it.
            left = solvers.LinearOperator(
                gram.shape, lambda x: gram @ x - vectors @ (values * (vectors.T @ x)), dtype=gram.dtype
            )
            missed = solvers.eigsh(left, 1, which="LA", v0=start[1], tol=1e-4, return_eigenvectors=False)[0]
            if missed <= values.min() + EPSILON * values.max():
                order = np.argsort(values)
                return values[order], vectors[:, order]
        except solvers.ArpackError:
            pass  # not converged
    return scipy.linalg.eigh(gram, subset_by_index=[n - k, n - 1])


def by_passes(apply: Callable[[Array], Array], squares: float, mean: Array, rows: int, k: int) -> PCA:
    """Return components from products with the centred Gram matrix, by block Krylov with full reorthogonalisation.

    Source: Musco and Musco, "Randomized block Krylov methods", NeurIPS 2015.
    """
    n = len(mean)
    width = min(n, k + OVERSAMPLING)
    block = np.linalg.qr(np.random.default_rng(0).standard_normal((n, width)))[0]
    basis, images = np.empty((n, 0)), np.empty((n, 0))
    for _ in range(MAX_PASSES):
        basis, images = np.hstack([basis, block]), np.hstack([images, apply(block)])
        values, ritz = np.linalg.eigh(basis.T @ images)
        values, ritz = values[-k:], ritz[:, -k:]
        residual = np.linalg.norm(images @ ritz - (basis @ ritz) * values, axis=0)
        width = min(width, n - basis.shape[1])
        if residual.max() <= TOLERANCE * abs(values[-1]) or not width:
            break
        block = images[:, -width:]
        for _ in range(2):  # once leaves errors of rounding
            block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
    return _sorted(values, basis @ ritz, squares, mean, rows, k)


def _sorted(values: Array, vectors: Array, squares: float, mean: Array, rows: int, k: int) -> PCA:
    values, components = np.maximum(values[::-1], 0), vectors[:, ::-1].T
    largest = components[np.arange(k), np.abs(components).argmax(axis=1)]
    components = components * np.where(largest < 0, -1.0, 1.0)[:, None]
    ratio = values / squares if squares > 0 else np.zeros(k)
    return PCA(np.ascontiguousarray(components), values / (rows - 1), ratio, np.sqrt(values), mean, rows)


__all__ = ["MAX_GRAM_FEATURES", "PCA", "by_passes", "check_components", "from_gram"]
