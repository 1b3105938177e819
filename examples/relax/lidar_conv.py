# SPDX-License-Identifier: Apache-2.0
"""A submanifold convolution of 3 x 3 x 3 on a LiDAR scan, then a ReLU.

The result has a row for each occupied voxel; a voxel takes its occupied neighbours through the matrix of their offset,
which is `R.sparse.gather_matmul_scatter` with an offset as the kind of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from common import Case, Line, compare, model, options, random, real_file, torch
from tvm.relax import op

import sparsetir.relax as srelax

OFFSETS = np.array(list(product((-1, 0, 1), repeat=3)))
constant = srelax.operators.constant


def scan(*, small: bool) -> np.ndarray:
    """Points of a scan in metres, (n, 3)."""
    found = real_file("pointcloud/lidar_spin.npz", small=small)
    if found is not None:
        return np.load(found)["xyz"]
    rays, rings = (90, 8) if small else (1090, 64)
    turn, tilt = np.meshgrid(np.linspace(0, 2 * np.pi, rays), np.linspace(-0.4, 0.1, rings))
    wall = 12 / np.maximum(np.abs(np.cos(turn)), np.abs(np.sin(turn)))  # a square room, 24 m wide
    floor = np.where(tilt < 0, 1.7 / np.maximum(-np.tan(tilt), 1e-6), np.inf)
    reach = np.minimum(wall, floor)
    return np.stack([reach * np.cos(turn), reach * np.sin(turn), reach * np.tan(tilt)], axis=-1).reshape(-1, 3)


def voxels(points: np.ndarray, size: float) -> np.ndarray:
    """Return the occupied voxels, (n, 3), in order."""
    return np.unique(np.floor((points - points.min(axis=0)) / size).astype(np.int64), axis=0)


def neighbours(sites: np.ndarray) -> np.ndarray:
    """Return the row of each voxel's neighbour at each offset, (n, 27); -1 where there is none."""
    shape = sites.max(axis=0) + 3
    number = lambda places: np.ravel_multi_index(tuple((places + 1).T), shape)  # noqa: E731
    own = number(sites)
    found = []
    for offset in OFFSETS:
        other = number(sites + offset)
        at = np.minimum(np.searchsorted(own, other), len(own) - 1)
        found.append(np.where(own[at] == other, at, -1))
    return np.stack(found, axis=1)


def convolution(sites: np.ndarray, size: float, inner: int, outer: int) -> Case:
    """Return ``relu(sum over offsets of X[neighbour] W[offset] + b)`` in three ways."""
    table = neighbours(sites)
    rows, kinds = np.nonzero(table >= 0)
    indices = table[rows, kinds].astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum((table >= 0).sum(axis=1))]).astype(np.int32)
    X, bias = random(len(sites), inner, seed=1), random(outer, seed=3)
    W = random(len(OFFSETS), inner, outer, seed=2, scale=(9 * inner) ** -0.5)

    def sparse(b: Any, X: Any) -> Any:
        structure = [constant(part) for part in (indptr, indices, kinds.astype(np.int32))]
        total = b.emit(srelax.gather_matmul_scatter(X, constant(W), *structure))
        return op.nn.relu(b.emit(op.add(total, constant(bias))))

    def dense(b: Any, X: Any) -> Any:
        padded = b.emit(op.concat([X, constant(np.zeros((1, inner), np.float32))], axis=0))
        every = b.emit(op.take(padded, constant(np.where(table < 0, len(sites), table).reshape(-1)), axis=0))
        wide = b.emit(op.reshape(every, [len(sites), len(OFFSETS) * inner]))
        total = b.emit(op.matmul(wide, constant(W.reshape(-1, outer))))
        return op.nn.relu(b.emit(op.add(total, constant(bias))))

    total = np.zeros((len(sites), outer), np.float32)
    for kind in range(len(OFFSETS)):
        at = table[:, kind] >= 0
        total[at] += X[table[at, kind]] @ W[kind]
    return Case(
        f"{inner}-{outer} channels, {size} m: {len(sites)} voxels, {len(rows)} pairs",
        [X],
        model(sparse, X),
        model(dense, X),
        lambda: torch_convolution(table, X, W, bias),
        np.maximum(total + bias, 0),
    )


def torch_convolution(
    table: np.ndarray, X: np.ndarray, W: np.ndarray, bias: np.ndarray
) -> Mapping[str, Callable[[], Any]]:
    """Return a product for each offset, and one over the neighbours at all offsets, zeros for absent ones."""
    held, weights, added = (torch.from_numpy(a) for a in (X, W, bias))
    to = [torch.from_numpy(np.flatnonzero(column >= 0)) for column in table.T]
    of = [torch.from_numpy(column[column >= 0]) for column in table.T]
    padded = torch.from_numpy(np.where(table < 0, len(X), table))

    def each() -> Any:
        with torch.inference_mode():
            total = held.new_zeros(len(X), W.shape[2])
            for kind, (rows, columns) in enumerate(zip(to, of, strict=True)):
                total.index_add_(0, rows, held[columns] @ weights[kind])
            return torch.relu(total + added)

    def at_once() -> Any:
        with torch.inference_mode():
            every = torch.cat([held, held.new_zeros(1, held.shape[1])])[padded]
            return torch.relu(torch.addmm(added, every.flatten(1), weights.flatten(0, 1)))

    return {"mm by offset": each, "gathered at once": at_once}


def main(argv: Sequence[str] | None = None) -> list[Line]:
    """Print the table."""
    args = options(__doc__, argv)
    points = scan(small=args.small)
    inner, outer = (8, 16) if args.small else (32, 64)
    sizes = (0.5,) if args.small else (0.1, 0.2)
    lines = compare(
        "Submanifold convolution",
        [convolution(voxels(points, size), size, inner, outer) for size in sizes],
        rounds=args.rounds,
    )
    print("dense: all 27 neighbours of each voxel, zeros for absent ones, in one product")
    return lines


if __name__ == "__main__":
    main()
