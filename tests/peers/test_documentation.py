"""Every block of Python in the README and the documentation runs, and prints what the page says it prints.

A block of ``text`` right after a block of ``python`` is what that prints. The blocks of a section run one after the other;
a section goes from one heading of the second level to the next. One that imports a framework runs where that is asked for.
"""

import contextlib
import importlib
import io
import re
import tomllib
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from attention_core.backend import get_backend

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "jax", "tensorflow")
FIELD = (
    *("KV cache", "GQA", "MQA", "MLA", "varlen", "padding mask", "sliding window", "half precision", "split-KV"),
    *("context parallelism", "tensor parallelism", "all-gather KV", "Ulysses", "flash-decoding", "no host sync"),
    *("bitwise equal", "batch invariant", "deterministic", "fully masked", "differential attention", "post-norm"),
)
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<printed>.*?)^```$)?", re.DOTALL | re.MULTILINE)

# Python shows no other warnings of libraries.
SHOWN = (UserWarning, FutureWarning, RuntimeWarning, SyntaxWarning)
# What frameworks print of themselves when they start, on their stream of logs.
STARTED = re.compile(r"^(WARNING: All log messages before absl.*\n?|[IW]0000 .*\n?)", re.MULTILINE)


class Section(NamedTuple):
    """A section of a page, with the line on which it starts."""

    page: Path
    line: int
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.title}"


def sections(page: Path) -> list[Section]:
    found, line = [], 1
    for text in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        found.append(Section(page, line, text.strip().partition("\n")[0].strip("# "), text))
        line += text.count("\n")
    return found


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECTIONS = [section for page in PAGES for section in sections(page) if BLOCK.search(section.text)]


def imported(section):
    """The frameworks that a section imports."""
    libraries = {name: (name, f"attention_{name}", f"attention_models.{name}") for name in FRAMEWORKS}
    libraries |= {"keras": ("keras", "attention_keras", "attention_models.keras"), "transformers": ("transformers",)}
    return {
        "tensorflow" if framework == "keras" else framework
        for framework, names in libraries.items()
        if re.search(rf"^(import|from) ({'|'.join(names)})\b", section.text, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "section", [pytest.param(each, id=str(each), marks=pytest.mark.needs(*imported(each))) for each in SECTIONS]
)
def test_page_prints_what_it_says_and_no_warning(section, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():  # of frameworks about one another, when they are first imported
        warnings.simplefilter("ignore")
        for framework in imported(section):
            importlib.import_module(framework)
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in SHOWN:
            warnings.simplefilter("always", category)
        run_blocks(section, names)
    assert not [str(each.message) for each in caught]
    assert not STARTED.sub("", capfd.readouterr().err).strip()


def run_blocks(section, names):
    for block in BLOCK.finditer(section.text):
        printed = io.StringIO()
        line = section.line + section.text[: block.start()].count("\n")
        # As many empty lines before the code as the page has, so that a traceback names the line on the page.
        code = compile("\n" * line + block["code"], str(section.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert block["printed"] is None or printed.getvalue().strip() == block["printed"].strip()


@pytest.mark.parametrize("library", [pytest.param(name, marks=pytest.mark.needs(name)) for name in FRAMEWORKS])
def test_the_decoder_from_scratch_is_one_of_every_library(library):
    (section,) = (each for each in SECTIONS if each.page.name == "language-models.md" and "\nxp = np\n" in each.text)
    names = {"__name__": "__main__", "namespace": get_backend(library).namespace}
    text = section.text.replace("\nxp = np\n", "\nxp = namespace\n")
    if library == "jax":  # which compiles eager operations one by one
        names["jit"] = get_backend(library).compile
        text = text.replace("\ndef step(", "\n@jit\ndef step(")
    run_blocks(section._replace(text=text), names)


def test_the_reference_prints_the_help_of_every_command():
    page = (ROOT / "docs" / "reference" / "conformance.md").read_text(encoding="utf-8")
    names = {each.name for each in importlib.import_module("attention_cli.app").app.registered_commands}
    assert set(re.findall(r"^```\{command\} (\w+)$", page, re.MULTILINE)) == names


def test_pages_are_few_and_have_the_words_that_users_look_for():
    """All words count, of code, tables and pages of reference, too; only pages under Evidence are left out."""
    evidence = ROOT / "docs" / "evidence"
    texts = [page.read_text(encoding="utf-8") for page in PAGES if evidence not in page.parents]
    words = " ".join(texts).split()
    assert len(texts) <= 30
    assert len(words) <= 30_000
    assert not [word for word in FIELD if word.lower() not in " ".join(words).lower()]


def test_links_of_the_package_index_are_absolute():
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)|src(?:set)?=\"([^\"]*)\"", text)
    ours = [link.partition("/main/")[2] for pair in links for link in pair if "attention-core/attention-core/" in link]
    assert all(link.startswith("https://") for pair in links for link in pair if link)
    assert len(ours) > 8
    assert all((ROOT / link.partition("#")[0]).exists() for link in ours)
    assert not re.search(r"!\[[^]]*\]\((?!https://raw\.)", text)  # a page about an image is none


def test_continuous_integration_runs_the_test_command_of_the_readme():
    last = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1]
    assert f"\n{last}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_shows_code_before_line_15_and_ends_before_line_91():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "```python" in lines[:15]
    assert len(lines) <= 90


def public_modules():
    import attention_core
    import attention_models as models
    from attention_core import cache, functions, initializers, layers, masks, parameters, pieces, scores, weights
    from attention_files import safetensors
    from attention_models import layouts

    core = (attention_core, cache, functions, initializers, layers, masks, parameters, pieces, scores, weights)
    return (*core, layouts, safetensors, models, models.parameters)


def reference():
    return "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md"))


def test_reference_has_every_public_name():
    """By its docstring, which the page of its module takes; by a line of its own, if it has none."""
    text = reference()
    for module in public_modules():
        assert f".. automodule:: {module.__name__}\n   :members:\n" in text
        for name in module.__all__:
            thing = getattr(module, name)
            has_docstring = callable(thing) and thing.__doc__
            assert has_docstring or f".. autodata:: {module.__name__}.{name}\n" in text, f"{module.__name__}.{name}"


def test_the_reference_has_what_the_page_of_names_says():
    known = reference() + " ".join(name for module in public_modules() for name in module.__all__)
    table = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").partition("|---|")[2].partition("\n## ")[0]
    cells = [cell for row in table.splitlines() for cell in row.split("|")[2:4]]
    names = {name for cell in cells for name in re.findall(r"`[a-z_.]*?(\w+)`", cell)}
    assert len(names) > 35
    assert not [name for name in names if not re.search(rf"\b{name}\b", known)]
