"""What the cells of `tools/pace_cells.py` need of each library: arrays, programs, attention and layers of its own."""

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

Work = tuple[Callable[..., Any], list[Any]]  # a function and its arguments


class Problem(NamedTuple):
    """Sizes of one call of attention, its rule, a key of `OPTIONS`, and the dtype of its inputs."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    rule: str
    dtype: str = "float32"


SUBMODULES = ("backend", "cache", "functions", "layers", "masks", "random")
MODULES = ("attention_core", *(f"attention_core.{name}" for name in SUBMODULES), "attention_models")


def find(name: str, *modules: str) -> Any:
    """A public name of the tree that is measured, and of no other that is installed."""
    tree = os.environ.get("PACE_TREE", "") + os.sep
    for each in modules or MODULES:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(each)
            if hasattr(module, name) and str(module.__file__).startswith(tree):
                return getattr(module, name)
    raise LookupError(f"no {name}")


class Library:
    """What a cell needs of a library; this one is NumPy, with the formula as its attention."""

    name = "numpy"

    @property
    def namespace(self) -> Any:
        """The functions of the library, as the core takes them."""
        return find("get_backend")(self.name).namespace

    def array(self, x: Any, dtype: str | None = None) -> Any:
        """An array of the library; NumPy's keeps its dtype."""
        return x

    def draw(self, *shape: int) -> Any:
        """The same numbers on every library."""
        import numpy as np

        return self.array(np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32))

    def program(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Callable[..., Any]:
        """A function in a mode, done when it returns: its output, or gradients by its first arguments.

        A program for open sizes takes all arguments of the ranks and dtypes of these.
        """
        return function

    def counts(self, program: Any, arguments: list[Any]) -> tuple[int, int]:
        """How many graphs a program has, and how many operations."""
        return 0, 0

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, extra: Any = None) -> Any:
        """Attention as the library has it, or the formula; `extra` is a mask as a boolean array, or a bias."""
        import numpy as np

        batch, heads, kv_heads, queries, keys, width, rule, _ = problem
        rows = (q * np.float32(width**-0.5)).reshape(batch, kv_heads, -1, width)  # of all heads of a group
        scores = (rows @ np.swapaxes(k, -1, -2)).reshape(batch, heads, queries, keys)
        allowed = np.tri(queries, keys, dtype=bool) if rule == "causal" else extra
        if allowed is not None:
            scores = scores + extra if rule == "bias" else np.where(allowed, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return (weights.reshape(batch, kv_heads, -1, keys) @ v).reshape(q.shape)

    def layout(self, problem: Problem, x: Any) -> Any:
        """An array of shape (B, H, L, D) of NumPy as `attend` takes it."""
        return x

    def layer(self, kind: str, peer: bool, dropout: float = 0.0) -> Work | None:
        """A layer on its input; None where the library has no such layer."""
        raise NotImplementedError


def settings_of(kind: str, dropout: float) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The settings of a layer, and the shape of its input with channels last."""
    if kind == "SaganAttention":
        return {"channels": 32}, (2, 32, 32, 32)
    further = {} if kind == "MultiHeadAttention" else {"inner": 256}
    return {"channels": 128, "num_heads": 4, "dropout": dropout} | further, (4, 64, 128)


class Torch(Library):
    """PyTorch: eager, compiled for fixed sizes, or for open ones."""

    name = "torch"

    def array(self, x: Any, dtype: str | None = None) -> Any:
        import torch

        return torch.from_numpy(x).to(dtype and getattr(torch, dtype))

    def program(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Callable[..., Any]:
        import torch

        parameters = [*function.parameters()] if isinstance(function, torch.nn.Module) else []
        if mode != "eager":
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            function = torch.compile(function, dynamic=mode == "open")

        def output(*arguments: Any) -> Any:
            with torch.no_grad():
                return function(*arguments)

        def gradients(*arguments: Any) -> Any:
            of = [*(x.requires_grad_() for x in arguments[:leaves]), *parameters]
            found = function(*arguments)
            return torch.autograd.grad(found, of, torch.ones_like(found))

        return gradients if leaves else output

    def counts(self, program: Any, arguments: list[Any]) -> tuple[int, int]:
        import torch

        found = torch._dynamo.utils.counters["stats"]
        return found["unique_graphs"], found["calls_captured"]

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, extra: Any = None) -> Any:
        import torch

        options = {"is_causal": problem.rule == "causal", "enable_gqa": problem.heads != problem.kv_heads}
        rate = 0.1 if problem.rule == "dropout" else 0.0
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=extra, dropout_p=rate, **options)

    def layer(self, kind: str, peer: bool, dropout: float = 0.0) -> Work | None:
        import torch

        settings, shape = settings_of(kind, dropout)
        x, options = self.draw(*shape), {"activation": "gelu", "batch_first": True, "norm_first": True}
        if not peer:
            return find(kind, "attention_torch")(**settings).train(dropout > 0), [x]
        if kind == "EncoderLayer":
            return torch.nn.TransformerEncoderLayer(128, 4, 256, dropout, **options).train(dropout > 0), [x]
        attention = torch.nn.MultiheadAttention(128, 4, batch_first=True)
        return (lambda x: attention(x, x, x, need_weights=False)[0], [x]) if kind == "MultiHeadAttention" else None


class Jax(Library):
    """JAX: jitted, or eager."""

    name = "jax"

    def array(self, x: Any, dtype: str | None = None) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(x, dtype=dtype)

    def program(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Callable[..., Any]:
        import jax

        whole = jax.grad(lambda *rest: function(*rest).sum(), tuple(range(leaves))) if leaves else function
        compiled = jax.jit(whole) if mode == "jit" else whole

        def done(*arguments: Any) -> Any:
            return jax.block_until_ready(compiled(*arguments))

        done.program = compiled
        return done

    def counts(self, program: Any, arguments: list[Any]) -> tuple[int, int]:
        import jax

        return program.program._cache_size(), str(jax.make_jaxpr(program.program)(*arguments)).count(" = ")

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, extra: Any = None) -> Any:
        import jax

        options = {"bias" if problem.rule == "bias" else "mask": extra, "is_causal": problem.rule == "causal"}
        return jax.nn.dot_product_attention(q, k, v, **options)

    def layout(self, problem: Problem, x: Any) -> Any:
        return x.transpose(0, 2, 1, 3).copy()

    def layer(self, kind: str, peer: bool, dropout: float = 0.0) -> Work | None:
        settings, shape = settings_of(kind, dropout)
        if peer:
            return None
        return (lambda layer, x: layer(x)), [find(kind, "attention_jax").init(0, **settings), self.draw(*shape)]


class TensorFlow(Library):
    """TensorFlow, with Keras' attention: a graph of fixed or of open sizes, or XLA."""

    name = "tensorflow"

    def array(self, x: Any, dtype: str | None = None) -> Any:
        import tensorflow as tf

        return tf.constant(x) if dtype is None else tf.cast(x, dtype)

    def program(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Callable[..., Any]:
        import tensorflow as tf

        def gradients(*arguments: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arguments[:leaves])
                output = function(*arguments)
            return tape.gradient(output, arguments[:leaves])

        whole = gradients if leaves else function
        opened = [tf.TensorSpec([None] * x.ndim, x.dtype) for x in arguments] if mode == "open" else None
        compiled = tf.function(whole, opened, autograph=False, jit_compile=mode == "xla")
        return whole if mode == "eager" else compiled

    def counts(self, program: Any, arguments: list[Any]) -> tuple[int, int]:
        graph = program.get_concrete_function(*arguments).graph.as_graph_def()
        inner = sum(len(function.node_def) for function in graph.library.function)
        return program.experimental_get_tracing_count(), len(graph.node) + inner

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, extra: Any = None) -> Any:
        import keras

        options = {"bias" if problem.rule == "bias" else "mask": extra, "is_causal": problem.rule == "causal"}
        return keras.ops.dot_product_attention(q, k, v, **options)

    def layout(self, problem: Problem, x: Any) -> Any:
        return x.repeat(problem.heads // x.shape[1], axis=1).transpose(0, 2, 1, 3).copy()

    def layer(self, kind: str, peer: bool, dropout: float = 0.0) -> Work | None:
        import keras

        settings, shape = settings_of(kind, dropout)
        if not peer:
            return find(kind, "attention_keras")(**settings), [self.draw(*shape)]
        layer = keras.layers.MultiHeadAttention(4, 32)
        return (lambda x: layer(x, x), [self.draw(*shape)]) if kind == "MultiHeadAttention" else None


LIBRARIES: dict[str, type[Library]] = {each.name: each for each in (Library, Torch, Jax, TensorFlow)}
