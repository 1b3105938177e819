# SPDX-License-Identifier: Apache-2.0
"""The order of the examples in the gallery: what most readers have first."""

from __future__ import annotations

ORDER = [
    "scipy_script",
    "gnn_training",
    "pruned_transformer",
    "mixture_of_experts",
    "own_format",
    "fused_attention",
    "ktruss",
    "search",
    "three_stages",
    "export_to_c",
    "single_cell_pca",
    "dask_arrays",
    "retrieval",
]


class GalleryOrder:
    """Sort key of sphinx-gallery; examples that are not listed come last, by name."""

    def __init__(self, _folder: str) -> None:
        """Take the folder that sphinx-gallery passes."""

    def __call__(self, file: str) -> tuple[int, str]:
        """Return the key of a file."""
        name = file.removesuffix(".py")
        return (ORDER.index(name) if name in ORDER else len(ORDER), name)

    def __repr__(self) -> str:
        """Return the same text in each process: the configuration is compared with that of the last build."""
        return "GalleryOrder"
