"""Sphinx: ``python -m sphinx -W docs build/site`` (extra ``docs``), without a network."""

from __future__ import annotations

import atexit
import gc
import sys
from pathlib import Path

import murmurate

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

# To look for garbage among the trees of all pages took half of the time of a build; without it a build takes
# 1 GB of memory instead of half.
gc.disable()
atexit.register(gc.freeze)

project = "murmurate"
author = "the murmurate authors"
release = version = murmurate.__version__
html_title = f"murmurate {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "mathml",
    "pages_from_outside",
    "tables_of_registries",
    "command_line",
    "plain_docstrings",
]
exclude_patterns = ["_ext", "_static"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # no page has code that the build would have to run

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

smartquotes = False
highlight_language = "text"
copybutton_selector = (
    "div.highlight-bash pre, div.highlight-python pre, div.highlight-yaml pre, div.highlight-docker pre"
)

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/logo.svg"
html_logo = "_static/logo.svg"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {
        "color-brand-primary": "#1f5f8b",
        "color-brand-content": "#1f5f8b",
        "color-brand-visited": "#5b4b8a",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc0e8",
        "color-brand-content": "#7cc0e8",
        "color-brand-visited": "#b3a4e0",
    },
}
