"""Names and prose: the field's words, short sentences, short files. Run as a script, it checks any paths."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
FOLDERS = (
    "attention_core",
    "backends",
    "toolkit",
    "evidence",
    "docs",
    "examples",
    "tests",
    "tools",
    "vectors",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
MAX_WORDS, MAX_LINES = 30, 500

# Words of former versions, and what is said instead. They are looked for in names, comments and prose alike.
WORDS = {
    "tame|calm": "all_finite, products_finite",
    "moderate": "exp_without_max",
    "gain": "scale",
    "peaks?": "maximum, row_max",
    "rise": "d_weights",
    "slopes?": "d_scores",
    "strips?": "query chunk",
    "outlines?|slots?": "tree definition, leaf",
    "rebuilt": "unflatten",
    "pull|pulled|pulling|torn": "attended inf, cotangent",
    "handed[ _](?:out|over)": "fan_out, passed to",
    "swept|sweeps?": "visit",
    "spelled": "encode, decode",
    "linear_to_be|(?:parameter|map)s? to be": "spec",
    "tiles?|tiled": "block",
    "rubbish": "NaN and infinities, non-finite",
    "laws?": "test, property, initializer",
    "entr(?:y|ies) of (?:the |a |every )?(?:batch|leading)": "batch",
    "beside": "besides, next to",
    "attends?(?= (?!to\\b)\\w)|(?:is|are|be|was|were|been) attended(?! to\\b|$)|attending(?! to\\b)": "attend to",
    "(?:may )?attends? (?:to )?nothing|attended by nothing": "fully masked row",
    "(?:one|two|another|each|any|the|this)[ _]subjects?|subjects": "kernel, implementation",
    "(?:a|one|each|another|the)[ _]findings?": "result",
}
# What the same words mean elsewhere, and so may stand.
ALLOWED = {
    r"(?:np|jnp|xp|tf|torch|namespace)\.tile\b": "the function of the array API",
    r"\.[lr]?strip\(": "the method of str",
    r"[Pp]eak memory|\w*\bpeak_growth|\w*peak_memory\w*|\.peak\(|def peak\(|reset_peak\w*|\"peak\"": "memory",
    r"ALiBi slopes?|alibi\w*_slopes?": "the name of ALiBi's rates",
    r"__slots__": "Python",
    r"\battend\(|\battend[,_]|import \w*attend\b": "a function",
    r"^# title = .*$": "of a public thread, as it stands",
    r"[\"']tile[\"']|repeat, tile;|or tile, (?:where|if) heads|repeat or tile": "an order of heads, as the function's",
}
FILLERS = {"own", "given", "place"}


def sources(path):
    """The Python and Markdown files at a path: a file, a folder or a pattern."""
    files = sorted(file for match in ROOT.glob(path) for file in [match, *match.rglob("*")])
    hidden = {".nox", ".venv"}
    return [file for file in files if file.suffix in (".py", ".md") and not hidden & set(file.relative_to(ROOT).parts)]


def words_in(text):
    """Former words in a text, by line."""
    pattern = "|".join(f"(?P<w{index}>{word})" for index, word in enumerate(WORDS))
    pattern = re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![a-z])", re.IGNORECASE)
    allowed = re.compile("|".join(ALLOWED))
    for number, line in enumerate(text.splitlines(), start=1):
        for match in pattern.finditer(allowed.sub("", line)):
            yield number, f"{match[0]!r}: say {list(WORDS.values())[int(match.lastgroup[1:])]}"


def fillers_in(text):
    """Variables with names that say nothing; fields of a public class keep theirs."""
    tree = ast.parse(text)
    fields = {node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and not node.value}
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        if name in FILLERS and node not in fields and not isinstance(getattr(node, "ctx", None), ast.Load):
            yield node.lineno, f"variable {name!r}: name what it is"


def prose_of(path, text):
    """The prose of a file: docstrings, or a page without its code, with the numbers of their first lines."""
    if path.suffix == ".md":
        yield 1, re.sub(r"^(```|~~~).*?^\1.*?$|<!--.*?-->", blank, text, flags=re.DOTALL | re.MULTILINE)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            yield node.body[0].lineno, node.body[0].value.value


def blank(match):
    return "\n" * match[0].count("\n")


def sentences_in(prose):
    """Sentences with their lines: examples, formulas, tables and headings left out, items of lists apart."""
    prose = re.sub(r"^ *<\w.*?>$", blank, prose, flags=re.MULTILINE)  # HTML
    prose = re.sub(r"^ *>>>.*?(?=\n\s*\n|\Z)", blank, prose, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^( *)\.\. \w.*?(?=\n\1\S|\Z)", blank, prose, flags=re.DOTALL | re.MULTILINE)
    start, margin, marked, lines = 1, 0, False, []
    for number, line in enumerate([*prose.splitlines(), ""], start=1):
        text, indent = line.strip(), len(line) - len(line.lstrip())
        is_item = bool(re.match(r"(?:[*+-]|\d+\.) ", text))
        is_entry = bool(re.match(r"\*{0,2}\w+(?:, \*{0,2}\w+)* : \S", text))  # a parameter and its type
        is_prose = bool(text) and not is_entry and text[0] not in "|#" and not set(text) <= set("-=")
        goes_on = is_prose and not is_item and (start == 1 or (indent > margin if marked else indent == margin))
        if lines and not goes_on:
            yield from ((start, sentence) for sentence in re.split(r"(?<=[.!?])[)\"*_]*\s+", " ".join(lines)))
            lines = []
        if is_prose:
            start, margin, marked = (start, margin, marked) if lines else (number, indent, is_item)
            lines.append(text)


def length(sentence):
    """The number of words; a piece of code, a formula or a link counts as one."""
    plain = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`|\$[^$]*\$", "code", sentence)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return len([word for word in plain.split() if re.search(r"\w", word)])


def findings(path):
    """Everything that a file says or does amiss: lines and messages."""
    text = path.read_text(encoding="utf-8")
    if path.name != Path(__file__).name:
        yield from words_in(text)
    if path.suffix == ".py":
        yield from fillers_in(text)
    if text.count("\n") > MAX_LINES:
        yield MAX_LINES, f"{text.count(chr(10))} lines: expected at most {MAX_LINES}"
    for first, prose in prose_of(path, text):
        for line, sentence in sentences_in(prose):
            if length(sentence) > MAX_WORDS:
                yield first + line - 1, f"{length(sentence)} words: {sentence[:60]}…"


def report(path):
    files = sources(path)
    assert files, f"expected files at {path}; got none"
    return [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for line, what in findings(file)]


@pytest.mark.parametrize("path", FOLDERS)
def test_names_and_sentences_are_those_of_the_field(path):
    assert not report(path)


def test_what_is_amiss_is_found():
    """The checks themselves, on texts with one fault each."""
    assert not list(words_in("x.strip() np.tile is peak memory; besides, keys attend to keys"))
    for text in ("the tile", "is_tame", "a Strip", "beside the mask", "queries attend keys", "is attended by"):
        assert list(words_in(text)), text
    assert list(fillers_in("def f(own): pass"))
    assert not list(fillers_in("x = own"))
    long, short = "word " * 31 + "end.", "word " * 20 + "end."
    for text in (long, f"Short.\n\n* {short}\n* {long}", f"Short.\n    {long}"):
        assert max(length(sentence) for _, sentence in sentences_in(text)) == 32
    for text in (f"* {short}\n* {short}", f">>> {long}", f".. math:: x\n\n    {long}", f"| {long} |"):
        assert max([length(sentence) for _, sentence in sentences_in(text)], default=0) < 30


if __name__ == "__main__":
    print("\n".join(line for path in sys.argv[1:] for line in report(path)))
