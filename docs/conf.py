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
suppress_warnings = ["myst.xref_missing"]  # pages outside of docs, which readers of the repository have


def setup(app):
    """Let |x| in a docstring be an absolute value."""
    app.connect("autodoc-process-docstring", _escape_bars)


def _escape_bars(app, what, name, obj, options, lines):
    lines[:] = [line.replace("|", r"\|") for line in lines]
