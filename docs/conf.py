"""Configuration of Sphinx."""

from importlib.metadata import version as version_of

from docutils import nodes
from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

from attention_cli.app import app as commands

project = "attention-core"
author = "The attention-core developers"
project_copyright = "The attention-core developers"
release = version = version_of("attention-core")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
    "sphinx_design",
]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
default_role = "py:obj"  # `scaled_dot_product_attention` in a docstring is a link

autodoc_typehints = "none"  # the docstrings say it with shapes
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what overrides is described where it is first defined
numpydoc_show_class_members = False
autodoc_mock_imports = ["dask", "flax", "jax", "torch"]  # of which the pages need only the words that we write
_MockObject.__signature__ = None  # of functions that an adapter asks for theirs

# The examples in docstrings name what stands next to them.
core = ("backend", "cache", "functions", "initializers", "masks", "parameters", "pieces", "scores", "weights")
modules = ("attention_core", *(f"attention_core.{name}" for name in core), "attention_conformance")
doctest_global_setup = "\n".join(f"from {module} import *" for module in modules)

html_theme = "furo"
html_title = f"attention-core {version}"
html_copy_source = False
html_static_path = ["_static"]
html_js_files = ["accessible.js"]
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = ">>> "


class Command(SphinxDirective):
    """What a command of ``attention-core`` says of its options."""

    required_arguments = 1

    def run(self):
        """Print its help, as wide as a block of code."""
        told = CliRunner().invoke(
            commands, [*self.arguments, "--help"], prog_name="attention-core", env={"COLUMNS": "100"}
        )
        return [nodes.literal_block(told.output, told.output.strip(), language="text")]


def setup(app):
    """Leave the pages of frameworks out of the doctests, as their libraries are not here; link names across modules."""

    def find(app, env, node, text):
        """Link a name of a docstring to what has it, if one thing alone has, whichever module it stands in."""
        domain = env.get_domain("py")
        found = domain.find_obj(env, None, None, node["reftarget"], None, 1) if node.get("refdomain") == "py" else []
        if len(found) == 1:
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0][0], node, text)
        return None

    def leave_out(app):
        if app.builder.name == "doctest":
            app.config.exclude_patterns += ["reference/frameworks.md"]
            app.config.suppress_warnings += ["toc.not_readable"]

    def is_field(app, what, name, member, skip, options):
        """Leave out fields of named tuples, which the class describes."""
        return True if type(member).__name__ == "_tuplegetter" else None

    app.add_directive("command", Command)
    app.connect("autodoc-skip-member", is_field)
    app.connect("builder-inited", leave_out)
    app.connect("missing-reference", find)
