"""Counts the lines of code of each room, and fails where there are more than `[tool.budgets]` of pyproject.toml allows.

Blank lines, comments, docstrings, imports and `__all__` are free. `--write` makes the present counts the budgets.
"""

import ast
import collections
import re
import sys
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
ROOMS = ("attention_core", "backends/*", "toolkit/*", "tests", "docs", "evidence", "examples", "tools", "vectors")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def main(words: list[str]) -> int:
    """Compare the counts with the budgets, or write them; return 1 if a room has more lines than its budget."""
    counts, text = counts_by_room(), PYPROJECT.read_text(encoding="utf-8")
    if words == ["--write"]:
        table = "".join(f'"{name}" = {count}\n' for name, count in sorted(counts.items()))
        text = re.sub(r"(?<=\[tool\.budgets\]\n)(?:.+ = \d+\n)*", table, text)
        PYPROJECT.write_text(text, encoding="utf-8")
    budgets = collections.Counter(tomllib.loads(text)["tool"]["budgets"])
    above, below = counts - budgets, budgets - counts  # each without what is not positive
    for name, count in sorted((above | below).items()):
        print(f"{name}: {counts[name]:,} lines of code, {count:,} {'above' if name in above else 'below'} its budget")
    return int(bool(above))


def counts_by_room() -> collections.Counter[str]:
    """Lines of code by room, and of all together."""
    folders = [folder for pattern in ROOMS for folder in ROOT.glob(pattern) if folder.is_dir()]
    paths = {folder.relative_to(ROOT).as_posix(): list(folder.rglob("*.py")) for folder in folders}
    paths["top"] = [*ROOT.glob("*.py"), *ROOT.glob("toolkit/*.py")]
    counts = collections.Counter({room: sum(map(lines_of_code, found)) for room, found in paths.items()})
    return counts + collections.Counter(all=counts.total())


def lines_of_code(path: Path) -> int:
    """Lines with a token that is more than layout, outside of what is free."""
    free = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())) | ast.Assign([ast.Name("__all__")]):
                free.update(range(node.lineno, node.end_lineno + 1))
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - free)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
