"""mypy and pyright read the types of all packages, and find a user's mistakes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = Path(__file__).parent / "typed" / "user.py"
PACKAGES = ["attention_core", *(each.parent.name for each in sorted(ROOT.glob("*/attention_*/__init__.py")))]
CHECKERS = {
    "mypy": ["--strict", "--config-file=mypy.ini", "--cache-dir=/dev/null", "--ignore-missing-imports"],
    "pyright": ["--pythonpath", sys.executable],
}
UNREAD = "torch.*,jax.*,dask.*,ndonnx.*,rich.*,pytest.*"  # by mypy, which takes long for each; pyright reads them all
EXPECTED = {
    number: line.partition("# error: ")[2]
    for number, line in enumerate(USER.read_text(encoding="utf-8").splitlines(), 1)
    if "# error: " in line
}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_has_types(package):
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    assert (Path(folder) / "py.typed").is_file()


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_finds_the_mistakes_of_a_user_and_nothing_else(checker, tmp_path):
    if importlib.util.find_spec(checker) is None:
        assert "ATTENTION_CORE_PEERS" not in os.environ
        pytest.skip(f"{checker} is not installed")
    folders = os.pathsep.join(str(ROOT / name) for name in (".", "backends", "toolkit"))
    (tmp_path / "user.py").write_text(USER.read_text())
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{UNREAD}]\nfollow_imports = skip\n")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": folders.split(os.pathsep)}))
    command = [sys.executable, "-m", checker, *CHECKERS[checker], "user.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"MYPYPATH": folders}
    )
    found = re.findall(r"^\s*\S*user\.py:(\d+)(?::\d+)?\s*[-:] error: (.*)$", ended.stdout, re.MULTILINE)
    assert {int(line) for line, _ in found} == set(EXPECTED), ended.stdout + ended.stderr
    for line, message in found:
        assert EXPECTED[int(line)] in message, message
