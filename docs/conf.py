"""Sphinx configuration: `make docs` writes docs/_build/html."""

from importlib import metadata

project = "expmflow"
version = release = metadata.version("expmflow")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
