"""What a bare installation with one library computes, and how it asks for the rest: ``python check.py LIBRARY``.

Run by ``nox -s tests`` in an environment that holds the named library and what it depends on, before the rest of it.
"""

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import attention_core as ac
from attention_core import layers
from attention_core.backend import get_backend
from attention_core.initializers import normal

LIBRARY = sys.argv[1]
OPTIONAL = ("ml_dtypes", "safetensors", "tokenizers", "typer")
LAYERS = {"torch": "attention_torch", "jax": "attention_jax", "tensorflow": "attention_keras"}


def refusal(call):
    """The text of the error for a package that is not there."""
    try:
        call()
    except ImportError as error:
        return str(error)
    raise AssertionError("expected an ImportError; got none")


def is_there(name):
    return importlib.util.find_spec(name) is not None


def main():
    library = importlib.import_module(LIBRARY)
    backend = get_backend(LIBRARY)
    xp = backend.namespace
    assert LIBRARY in backend.versions()
    query, key, value = (normal(seed, (1, 2, 5, 4), xp=xp) for seed in (1, 2, 3))
    mask = ac.Causal() & ac.KeyLengths(xp.asarray([4]))
    for implementation in ("dense", "blockwise", "auto"):
        output = ac.scaled_dot_product_attention(query, key, value, mask=mask, implementation=implementation)
        assert output.shape == (1, 2, 5, 4)
    for dtype in ("float16", "bfloat16"):
        if hasattr(xp, dtype):
            half = [xp.astype(x, getattr(xp, dtype)) for x in (query, key, value)]
            assert ac.scaled_dot_product_attention(*half).shape == (1, 2, 5, 4)
    reproducible = ac.scaled_dot_product_attention(
        query, key, value, arithmetic="reproducible", dropout=ac.Dropout(0.5, 1)
    )
    assert bool(xp.all(xp.isfinite(reproducible)))
    x = xp.reshape(normal(4, (1, 5, 8), xp=xp), (1, 5, 8))
    for definition in (layers.EncoderLayer(8, 2, 16), layers.MultiHeadAttention(8, 2), layers.FeedForward(8, 16)):
        assert definition(definition.init(0, xp=xp), x, xp=xp).shape == (1, 5, 8)
    if backend.differentiates:
        value, gradients = backend.value_and_grad(lambda x: xp.sum(ac.scaled_dot_product_attention(x, x, x)))(query)
        assert gradients[0].shape == query.shape
    if not is_there("attention_cli"):
        command = [sys.executable, "-m", "attention_core", "backends"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        told = "attention-core: the command needs the toolkit: install attention-toolkit[check]\n"
        assert (ended.returncode, ended.stderr) == (2, told)
    path = Path(tempfile.mkdtemp()) / "layer.safetensors"
    if LIBRARY in LAYERS:
        adapter = importlib.import_module(LAYERS[LIBRARY])
        layer = of(adapter)
        assert layer(x).shape == (1, 5, 8)
        if is_there("safetensors"):
            return
        lacking = next(name for name in ("ml_dtypes", "numpy", "safetensors") if not is_there(name))
        expected = f"expected {lacking} for files; got none: install attention-core[files]"
        assert refusal(lambda: adapter.save(layer, str(path))) == expected
        assert refusal(lambda: adapter.load(str(path))) == expected
    if not is_there("numpy"):
        told = "expected numpy for NumPy arrays; got none: pip install numpy"
        assert refusal(lambda: backend.to_numpy(query)) == told
        assert refusal(lambda: backend.from_numpy(query)) == told
    elif not is_there("ml_dtypes"):
        told = "expected ml_dtypes for bfloat16 in NumPy; got none: pip install ml_dtypes"
        assert refusal(lambda: backend.from_numpy(library.zeros(2), dtype="bfloat16")) == told
    assert not list(path.parent.iterdir())


def of(adapter):
    """An encoder layer as the framework has it."""
    options = {"channels": 8, "num_heads": 2, "inner": 16}
    return adapter.EncoderLayer.init(0, **options) if LIBRARY == "jax" else adapter.EncoderLayer(**options)


if __name__ == "__main__":
    main()
    print(f"{LIBRARY}: computes, without {', '.join(name for name in ('numpy', *OPTIONAL) if not is_there(name))}")
