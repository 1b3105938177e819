# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration; `make docs` builds the site without a network."""

from __future__ import annotations

import sys
from pathlib import Path

import sparsetir

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

project = "SparseTIR"
author = "The SparseTIR authors"
copyright = "The SparseTIR authors"
release = version = sparsetir.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "dialect_names",
    "format_names",
    "repository_links",
]
exclude_patterns = ["_build", "_ext", "gallery/*.py", "gallery/*.ipynb"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"
numpydoc_show_class_members = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "gallery.GalleryOrder",
    "image_scrapers": ("matplotlib",),
    "reset_modules": ("gallery.style_figures",),
    "capture_repr": ("_repr_html_",),
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
}

html_theme = "pydata_sphinx_theme"
html_context = {"default_mode": "auto"}
html_title = "SparseTIR"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# Pages without neighbours in their section.
html_sidebars = {"benchmarks": [], "changelog": [], "contributing": []}
html_theme_options = {
    "navbar_align": "left",
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
