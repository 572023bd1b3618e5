"""A backend and a kernel of a package outside of this repository, which knows the public modules of the core alone."""

import os
import pathlib
import re

import array_api_strict
import pytest
from backend_helpers import run

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


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_a_package_of_its_own_passes_the_conformance_kit(implementation, package):
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    printed = run(
        f"""
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
        failed = [str(result) for result in results if result.passed is False]
        print(sum(result.passed is True for result in results), failed, Kernel.attended, sep="|")
        """,
        PYTHONPATH=path,
    )
    passed, failed, attended = printed.split("|")
    assert int(passed) > 20
    assert failed == "[]"
    assert int(attended) > 0


ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("backends/**/*.py", "toolkit/attention_conformance/**/*.py", "docs/guides/*.md")
PRIVATE = re.compile(
    r"attention_core[\w.]*\._[a-z]\w*|^from attention_core[\w.]* import (?:\([^)]*?|.*?)(?<!\w)_[a-z]", re.MULTILINE
)


@pytest.mark.parametrize("pattern", FOLDERS)
def test_adapters_the_kit_and_guides_name_no_private_module_of_the_core(pattern):
    """Neither in their code nor in their prose."""
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob(pattern)}
    assert len(texts) > 5
    assert not {path: found for path, text in texts.items() if (found := PRIVATE.findall(text))}
    assert PRIVATE.search(f"{ADAPTER}\nfrom attention_core.backend import (cast_to,\n    _find)")
    assert not PRIVATE.search(ADAPTER)
