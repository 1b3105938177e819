# SPDX-License-Identifier: Apache-2.0
"""The gallery: the order of the examples, with what most readers have first, and the colours of their figures."""

from __future__ import annotations

from typing import Any

import matplotlib

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


def style_figures(_configuration: dict[str, Any], _file: str) -> None:
    """Draw on a transparent ground in a grey that is readable on the light and on the dark page."""
    grey = "#7d858f"
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(dict.fromkeys(inks, grey))
    matplotlib.rcParams.update({"axes.titlesize": "medium", "legend.framealpha": 0, "savefig.transparent": True})
