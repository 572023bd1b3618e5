"""A backend and a kernel of a package outside of this repository, which knows the public modules of the core alone."""

import ast
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import array_api_strict
import pytest

# An adapter, written with the guide "Adding a backend" in hand.
ADAPTER = """
import abacus
from abacus._array_object import Array
from attention_core import backend as core
from attention_core.backend import cast_to, default_scale, group_size, repeat_kv, upcast
from attention_numpy.trees import as_floating, map_arrays

class Kernel(core.Kernel):
    name = "abacus.attention"
    attended = 0

    takes = core.Takes(masks=("causal",))

    def refusal(self, call):
        if call.starts != (0, 0):
            return "counts positions from 0"
        if call.key.size == 0:
            return "needs a key"
        if not all(call.xp.all(call.xp.isfinite(x)) for x in (call.query, call.key, call.value)):
            return "lets NaN behind a mask through"
        return None

    def attend(self, call):
        Kernel.attended += 1
        xp = call.xp
        query, key, value = upcast((call.query, call.key, call.value), xp=xp)
        key, value = (repeat_kv(x, group_size(query, key, xp), xp=xp) for x in (key, value))
        scale = default_scale(query, xp) if call.scale is None else call.scale
        scores = xp.matmul(xp.multiply(query, scale), xp.matrix_transpose(key))
        if call.mask is not None:
            scores = xp.where(xp.tril(xp.ones(scores.shape, dtype=xp.bool)), scores, -xp.inf)
        weights = xp.exp(xp.subtract(scores, xp.max(scores, axis=-1, keepdims=True)))
        weights = xp.divide(weights, xp.sum(weights, axis=-1, keepdims=True))
        return cast_to(xp.matmul(weights, value), call.query.dtype, xp=xp)

class Backend(core.Backend):
    kernels = (Kernel(),)

    def owns(self, array):
        return isinstance(array, Array)

    def is_concrete(self, array):
        return True

    def devices(self):
        return ["cpu"]

    def from_numpy(self, tree, *, device=None, dtype=None):
        return map_arrays(lambda array: abacus.asarray(as_floating(array, dtype, self.dtypes).copy()), tree)

    def to_numpy(self, tree):
        return map_arrays(lambda array: array._array.copy(), tree)

    def to_device(self, tree, device):
        return tree

backend = Backend(abacus)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with a library, which is a copy of another, and its adapter, announced as if it were installed."""
    folder = tmp_path_factory.mktemp("third_party")
    (folder / "abacus").mkdir()
    for path in pathlib.Path(array_api_strict.__file__).parent.glob("*.py"):
        (folder / "abacus" / path.name).write_text(path.read_text().replace("array_api_strict", "abacus"))
    (folder / "attention_abacus.py").write_text(ADAPTER)
    announced = folder / "attention_abacus-1.0.dist-info"
    announced.mkdir()
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-abacus\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text("[attention_core.backends]\nabacus = attention_abacus:backend\n")
    return folder


def run(folder, script):
    """What a script prints in a fresh interpreter that finds the package."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("implementation", ["auto", "blockwise", "fused"])
def test_a_package_of_its_own_passes_the_conformance_kit(implementation, package):
    passed, failed, attended = map(
        int,
        run(
            package,
            f"""
            import sys
            import attention_core as ac
            from attention_abacus import Kernel
            from attention_conformance import CASES, check

            asked = {implementation!r}
            results = check(
                ac.scaled_dot_product_attention,
                backend="abacus",
                cases=CASES,
                dtypes=["float32"],
                implementations=None if asked == "auto" else [asked],
            )
            for result in results:
                if result.passed is False:
                    print(result, file=sys.stderr)
            counts = [sum(result.passed is outcome for result in results) for outcome in (True, False)]
            print(*counts, Kernel.attended)
            sys.exit(counts[1] > 0)
            """,
        ),
    )
    assert passed > 20
    assert failed == 0
    assert (attended > 0) == (implementation != "blockwise")


def test_auto_takes_the_kernel_of_a_package_of_its_own(package):
    printed = run(
        package,
        """
        import numpy as np
        import attention_core as ac
        from attention_abacus import Kernel

        backend = ac.backend.get_backend("abacus")
        x = backend.from_numpy(np.ones((1, 2, 5, 4), dtype="float32"))
        print(ac.explain_attention(x, x, x, is_causal=True).chosen, Kernel.attended)
        ac.scaled_dot_product_attention(x, x, x, is_causal=True)
        print(Kernel.attended)
        ac.scaled_dot_product_attention(x, x, x, is_causal=True, softcap=2.0)
        print(Kernel.attended)
        """,
    )
    assert printed == ["fused", "0", "1", "1"]


# What an adapter may import


def private_imports(source):
    """The private modules and names of the core that a text of Python imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("attention_core.") and "._" in name)


ROOT = pathlib.Path(__file__).parents[2]
WRITTEN_OUTSIDE = [*sorted(ROOT.glob("backends/**/*.py")), *sorted(ROOT.glob("toolkit/attention_conformance/**/*.py"))]
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))


def test_the_package_imports_no_private_module_of_the_core():
    assert not [*private_imports(ADAPTER)]


@pytest.mark.parametrize("path", WRITTEN_OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_adapters_and_the_kit_import_no_private_module_of_the_core(path):
    assert not [*private_imports(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guides_name_no_private_module_of_the_core(path):
    """Neither in their code nor in their prose."""
    assert not re.findall(r"attention_core(?:\.\w+)*\._[a-z]\w*", path.read_text(encoding="utf-8"))
