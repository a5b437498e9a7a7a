"""The site: Sphinx with MyST-NB, whose source is the whole repository.

Pages are the Markdown of `docs/`, and the results pages, the changelog and the guide to
contributions where they lie, so that a link in them leads to the same file on the site and in the
repository. `README.md` beside this file says why Sphinx.
"""

import ast
import importlib
import inspect
import os
import re
from pathlib import Path
from typing import get_origin

from docutils.utils.math.latex2mathml import tex2mathml
from jinja2 import Environment, StrictUndefined

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "results"

project = "modscope"
author = "The authors of modscope"
copyright = "The authors of modscope, MIT licence"
root_doc = "docs/index"
include_patterns = ["docs/**", "studies/results/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "dist", "runs", "docs/README.md", "docs/_build", "docs/root"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# Docstrings: names in backticks are links to what they name, where that is documented.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# Returns are lists of variables with dims, not a type and its description.
napoleon_custom_sections = ["Returns", "Source", ("Attributes", "params_style")]

# Pages.
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Settings and messages in blocks of text are no language.
highlight_language = "python"

# Notebooks are executed once, and again when they change.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = -1
nb_merge_streams = True
nb_output_stderr = "remove"  # progress

html_theme = "furo"
html_title = "modscope"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"

# Kernels import the packages from here, installed or not, and run small models: on one thread.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def exports(package: str) -> dict[str, list[tuple[str, str]]]:
    """The exports of a package by the folder or file that defines them.

    Returns:
        For each group, (directive of autodoc, full name).
    """
    folder = ROOT / package.replace(".", "/")
    lists = folder / "__init__.pyi", folder / "__init__.py"
    text = next(path for path in lists if path.exists()).read_text()
    module, groups = importlib.import_module(package), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            source = f"{package}.{node.module}" if node.level else node.module
            first = source.removeprefix(f"{package}.").split(".")[0 if node.level else -1]
            group = groups.setdefault(first.replace("_", " "), [])
            group += [_directive(module, package, source, one.name) for one in node.names]
    return groups


def _directive(module, package: str, source: str, name: str) -> tuple[str, str]:
    export = inspect.unwrap(getattr(module, name))
    if get_origin(export) is None and (inspect.isclass(export) or inspect.isroutine(export)):
        return "autoclass" if inspect.isclass(export) else "autofunction", f"{package}.{name}"
    return "autodata", f"{source}.{name}"  # whose text is where it is defined


def figures() -> dict[str, list[tuple[str, str]]]:
    """The figures of the results pages: for each page, (what a figure shows, its path)."""
    shown = {}
    for page in sorted(RESULTS.glob("*.md")):
        found = re.findall(r"!\[([^\]]*)\]\(([^)]+\.png)\)", page.read_text())
        if found:
            shown[page.stem] = found
    return shown


def _render(app, docname, source):
    """Fill in what pages of exports and figures list: they are templates of Jinja2."""
    if docname.startswith("docs/reference/") or docname == "docs/gallery":
        template = Environment(undefined=StrictUndefined).from_string(source[0])
        source[0] = template.render(exports=exports, figures=figures)


VALUES = ("attribute", "data", "property")
COLON = "\0"


def _hide(app, what, name, obj, options, lines):
    """Keep napoleon from reading "Number of answers: 2 or 4." as a type and its description."""
    if what in VALUES and lines:
        lines[0] = lines[0].replace(":", COLON)


def _escape(app, what, name, obj, options, lines):
    """Keep the stars of dims (`[split, *cells]`) and the bars of norms as they are."""
    for number, line in enumerate(lines):
        line = line.replace(COLON, ":")
        line = re.sub(r"\[[^\]`]*\]", lambda dims: dims.group().replace("*", r"\*"), line)
        lines[number] = line if ">>>" in line else line.replace("|", r"\|")


def _visit_math(self, node):
    # MathML needs neither a network nor scripts.
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise _skip()


def _visit_equation(self, node):
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise _skip()


def _skip():
    from docutils.nodes import SkipNode

    return SkipNode()


def setup(app):
    """Connect the functions above to Sphinx."""
    app.connect("source-read", _render)
    app.connect("autodoc-process-docstring", _hide, priority=400)
    app.connect("autodoc-process-docstring", _escape, priority=600)
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_equation, None))
