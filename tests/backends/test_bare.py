"""An installation with one library and nothing more computes, and asks for what else is needed by its command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "bare" / "check.py"
HIDDEN = ("safetensors", "tokenizers", "junitparser", "typer")
NEEDED = {"torch": (), "numpy": ("numpy",), "jax": ("numpy", "ml_dtypes"), "tensorflow": ("numpy", "ml_dtypes")}
LIBRARIES = ("numpy", "torch", "jax", "tensorflow")

SCRIPT = """
import runpy, sys
from importlib.machinery import PathFinder

class Finder:  # finds nothing of what is to be hidden
    find_distributions = staticmethod(PathFinder.find_distributions)

    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders if hasattr(finder, "find_spec"))
        return next((spec for spec in found if spec is not None), None)

hidden = sys.argv[1].split(",")
sys.meta_path[:] = [Finder(list(sys.meta_path))]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.needs(lambda backend: backend.name in LIBRARIES)
def test_one_library_is_enough(backend):
    name = backend.name
    others = [each for each in LIBRARIES if each != name and each not in NEEDED[name]]
    hidden = [each for each in (*others, "ml_dtypes", *HIDDEN) if each not in NEEDED[name]]
    command = [sys.executable, "-c", SCRIPT, ",".join(hidden), str(CHECK), name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith(f"{name}: computes, without ")
    assert "safetensors" in ended.stdout
