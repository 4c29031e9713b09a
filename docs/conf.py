"""Configuration of the documentation: ``make docs`` builds it into ``build/docs``; every warning is an error.

Nothing is fetched while the pages are built, so names of other projects are not links.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.ext.napoleon.docstring import GoogleDocstring

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pymoe  # noqa: E402 (from this tree)

PUBLIC_PACKAGES = [
    line.strip()
    for line in (ROOT / "docs/reference/api/index.md").read_text().split("```{toctree}")[1].splitlines()
    if line.startswith("pymoe.")
]
"""The packages with a page in the reference. A page documents every name in the package's ``__all__``."""

project = "pymoe"
author = "The pymoe authors"
copyright = author
version = release = pymoe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"pymoe {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
copybutton_selector = "div:not(.highlight-output):not(.highlight-text) > div.highlight pre"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Markdown: `[text](page.md#heading)` resolves to headings down to the third level.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The reference: what a package's __all__ names, from docstrings with Google-style sections.
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 100

# All references must resolve, except references to other projects and to aliases in signatures.
nitpicky = True
OTHER_PROJECTS = (
    r"(torch|nn|numpy|grpc|msgspec|prometheus_client|ray|transformers|collections|concurrent|typing|pathlib|enum)\..*"
)
IN_SIGNATURES = r"(Tensor|Module|ProcessGroup|Metric|CollectorRegistry|SplitPolicy|Spec|WeightFormat|Prefetch)"
nitpick_ignore_regex = [(r"py:.*", OTHER_PROJECTS), (r"py:class", IN_SIGNATURES)]


def _whole_docstring(self: GoogleDocstring) -> list[str]:
    """Keep ``(E,) int32: slots of each expert`` as it is; napoleon takes what stands before a colon for a type."""
    return self._dedent(self._consume_to_end())


GoogleDocstring._parse_attribute_docstring = _whole_docstring  # type: ignore[method-assign]


def documented_names() -> dict[int, str]:
    """Return under which name each public object is documented, by the object's ``id``."""
    names: dict[int, str] = {}
    for package in reversed(PUBLIC_PACKAGES):
        module = importlib.import_module(package)
        names |= {id(getattr(module, name)): f"{package}.{name}" for name in module.__all__}
    return names


def find(target: str, node: nodes.Element) -> Any:
    """Return the object that a reference means: absolute, or relative to its module or class; None if there is none."""
    for scope in ((), (node.get("py:module"),), (node.get("py:module"), node.get("py:class"))):
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            return pkgutil.resolve_name(".".join(filter(None, (*scope, target.lstrip(".")))))
    return None


def resolve(app: Any, env: Any, node: nodes.Element, content: nodes.Node) -> nodes.Node | None:
    """Lead ``pymoe.Pipe`` to ``pymoe.pipe.Pipe``, the same object; show what exists and is not documented as text."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or (found := find(target, node)) is None:
        return None
    if (documented := documented_names().get(id(found))) is None:
        return content
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", documented, node, content)


def setup(app: Any) -> None:
    app.connect("missing-reference", resolve)
