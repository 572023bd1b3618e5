"""The calls that `tools/pace.py` times, as data, and the process that times them in one tree.

``python tools/pace_cells.py LIBRARY`` reads orders and writes answers, a line of JSON each. It measures the
packages on its path, which may be those of another commit: what a cell needs is looked for where it stood at any time.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Call = Callable[[], Any]


class Problem(NamedTuple):
    """Sizes of one call of attention, and its rule: a key of `OPTIONS`."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    rule: str


class Cell(NamedTuple):
    """A call of a library, in a mode, forward or with gradients: an entry of `PROBLEMS` or of `OTHERS`."""

    library: str
    mode: str
    direction: str
    work: str

    def __str__(self) -> str:
        return " ".join(self)


EVERY = ("numpy eager", "torch eager", "jax jit", "tensorflow graph")
FRAMEWORKS = ("torch eager", "jax jit", "tensorflow graph")
COMPILED = ("torch compiled", "tensorflow xla")
OPEN = ("torch open", "tensorflow open")  # programs for all sizes
LAYERS = ("torch eager", "torch compiled", "jax jit", "tensorflow graph")

# name: problem, where forward, where with gradients
PROBLEMS: dict[str, tuple[Problem, tuple[str, ...], tuple[str, ...]]] = {
    "8 full": (Problem(1, 1, 1, 8, 8, 16, "full"), (*EVERY, *COMPILED), ()),
    "8 causal": (Problem(1, 1, 1, 8, 8, 16, "causal"), EVERY, ("torch eager",)),
    "32 lengths": (Problem(2, 4, 4, 32, 32, 32, "lengths"), EVERY, ("torch eager",)),
    "128 full": (Problem(16, 12, 12, 128, 128, 64, "full"), EVERY, FRAMEWORKS),
    "128 causal": (Problem(16, 12, 12, 128, 128, 64, "causal"), (*EVERY, *COMPILED), (*FRAMEWORKS, *COMPILED)),
    "128 lengths": (Problem(16, 12, 12, 128, 128, 64, "lengths"), (*EVERY, *OPEN), FRAMEWORKS),
    "128 bias": (Problem(16, 12, 12, 128, 128, 64, "bias"), EVERY, FRAMEWORKS),
    "128 dropout": (Problem(8, 4, 4, 128, 128, 16, "dropout"), FRAMEWORKS, FRAMEWORKS),
    "128 segments": (Problem(16, 12, 12, 128, 128, 64, "segments"), EVERY, FRAMEWORKS),
    "128 sinks": (Problem(16, 12, 12, 128, 128, 64, "sinks"), EVERY, ()),
    "512 causal": (Problem(2, 12, 12, 512, 512, 64, "causal"), EVERY, FRAMEWORKS),
    "512 causal grouped": (Problem(1, 32, 8, 512, 512, 128, "causal"), EVERY, ()),
    "512 lengths": (Problem(2, 12, 12, 512, 512, 64, "lengths"), EVERY, ()),
    "1024 full": (Problem(1, 8, 8, 1024, 1024, 64, "full"), EVERY, ()),
    "1024 segments": (Problem(1, 4, 4, 1024, 1024, 64, "segments"), FRAMEWORKS, ()),
    "2048 causal": (Problem(1, 4, 4, 2048, 2048, 64, "causal"), (*EVERY, *COMPILED), ("torch eager",)),
    "2048 window": (Problem(1, 4, 4, 2048, 2048, 64, "window"), EVERY, FRAMEWORKS),
    "4096 window": (Problem(1, 4, 4, 4096, 4096, 64, "window"), ("torch compiled", *OPEN), ()),
    "8192 window": (Problem(1, 1, 1, 8192, 8192, 64, "window"), EVERY, ()),
    "decode": (Problem(1, 16, 16, 1, 2048, 64, "full"), EVERY, ()),
    "decode grouped": (Problem(1, 32, 8, 1, 4096, 128, "full"), EVERY, ()),
    "decode lengths": (Problem(4, 16, 16, 1, 2048, 64, "lengths"), (*EVERY, *COMPILED), ()),
    "decode lengths grouped": (Problem(4, 32, 8, 1, 2048, 128, "lengths"), (*EVERY, "torch open"), ()),
    "chunk of 64 on 4096": (Problem(1, 32, 8, 64, 4096, 128, "last"), EVERY, ()),
}
# The options of ours by rule; `extra` is the array of the rule, if it has one.
OPTIONS: dict[str, Callable[[Problem, Any], dict[str, Any]]] = {
    "full": lambda problem, extra: {},
    "causal": lambda problem, extra: {"is_causal": True},
    "window": lambda problem, extra: {"mask": find("SlidingWindow")(left=255, right=0)},
    "last": lambda problem, extra: {"mask": find("Causal")(offset=problem.keys - problem.queries)},
    "lengths": lambda problem, extra: {"mask": find("KeyLengths")(extra)},
    "segments": lambda problem, extra: {"mask": find("Segments")(extra, extra)},
    "bias": lambda problem, extra: {"bias": extra},
    "sinks": lambda problem, extra: {"sinks": extra},
    "dropout": lambda problem, extra: {"dropout": find("Dropout")(0.1, 7)},
}
# name: what makes the call, where forward, where with gradients
OTHERS: dict[str, tuple[Callable[["Library", bool], Any], tuple[str, ...], tuple[str, ...]]] = {
    "MultiHeadAttention": (lambda lib, peer: lib.layer("MultiHeadAttention", peer), LAYERS, FRAMEWORKS),
    "EncoderLayer": (lambda lib, peer: lib.layer("EncoderLayer", peer, inner=256), LAYERS, FRAMEWORKS),
    "EncoderLayer dropout": (
        lambda lib, peer: lib.layer("EncoderLayer", peer, inner=256, dropout=0.1),
        (),
        ("torch eager",),
    ),
    "DecoderLayer": (lambda lib, peer: lib.layer("DecoderLayer", peer, inner=256), LAYERS[:3], ("torch eager",)),
    "SaganAttention": (
        lambda lib, peer: lib.layer("SaganAttention", peer, shape=(2, 32, 32, 32)),
        FRAMEWORKS,
        ("torch eager",),
    ),
    "rotary_embedding": (lambda lib, peer: None if peer else rotary(lib), EVERY, ()),
    "append": (lambda lib, peer: None if peer else cached(lib, attends=False), EVERY, ()),
    "append and attend": (lambda lib, peer: None if peer else cached(lib, attends=True), EVERY, ()),
}
# name: what makes a call that compiles, starts or writes text by itself, and where
WHOLE: dict[str, tuple[Callable[["Library", str, bool], Call | None], tuple[str, ...]]] = {
    "generate 8 tokens": (lambda lib, mode, peer: None if peer else generation(lib, mode), EVERY),
    "import and first call": (lambda lib, mode, peer: first_call(lib, peer), ("numpy eager", "torch eager", "jax jit")),
    "compile 12 calls": (
        lambda lib, mode, peer: twelve_calls(lib, mode, peer),
        ("torch compiled", "jax jit", "tensorflow graph"),
    ),
}
CELLS = tuple(
    Cell(*place.split(), direction, work)
    for table in (PROBLEMS, OTHERS)
    for work, (_, *places) in table.items()
    for direction, where in zip(("forward", "both"), places, strict=True)
    for place in where
) + tuple(Cell(*place.split(), "forward", work) for work, (_, where) in WHOLE.items() for place in where)
# What would have seen each loss of speed that was ever found, in three minutes.
QUICK = (
    "numpy eager forward 8 causal",
    "torch eager forward 8 full",
    "torch eager both 128 dropout",
    "torch open forward 4096 window",
    "jax jit forward 128 bias",
    "jax jit forward decode lengths",
    "jax jit forward decode lengths grouped",
    "jax jit forward chunk of 64 on 4096",
    "tensorflow graph forward 128 causal",
    "tensorflow graph forward 512 causal",
    "tensorflow graph forward decode lengths",
    "tensorflow graph forward decode lengths grouped",
)
MODULES = (  # where a public name stands, or stood
    "attention_core",
    *(f"attention_core.{name}" for name in ("cache", "functions", "layers", "backend", "masks", "random")),
    "attention_models",
)


class NotHereError(Exception):
    """The tree that is measured has no such name."""


def find(name: str, *modules: str) -> Any:
    """A public name of the tree that is measured, and of no other that is installed."""
    for each in modules or MODULES:
        try:
            module = importlib.import_module(each)
        except ImportError:
            continue
        tree = os.environ.get("PACE_TREE")
        if hasattr(module, name) and (tree is None or str(module.__file__).startswith(tree + os.sep)):
            return getattr(module, name)
    raise NotHereError(f"no {name}")


class Library:
    """What a cell needs of a library; this one is NumPy, with the formula as its own attention."""

    name = "numpy"

    @property
    def namespace(self) -> Any:
        return find("get_backend", "attention_core.backend")(self.name).namespace

    def array(self, x: Any) -> Any:
        """An array of the library."""
        return x

    def draw(self, *shape: int) -> Any:
        """The same numbers on every library."""
        import numpy as np

        return self.array(np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32))

    def bind(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Call:
        """A call in a mode, done when it returns; with gradients by the first `leaves` arguments if there are any."""
        return lambda: function(*arguments)

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, allowed: Any, bias: Any) -> Any:
        """Attention as the library has it, or the formula."""
        import numpy as np

        batch, heads, kv_heads, queries, keys, width, _ = problem
        rows = (q * np.float32(width**-0.5)).reshape(batch, kv_heads, -1, width)  # of all heads of a group
        scores = (rows @ np.swapaxes(k, -1, -2)).reshape(batch, heads, queries, keys)
        if bias is not None:
            scores = scores + bias
        if problem.rule == "causal":
            allowed = np.tri(queries, keys, dtype=bool)
        if allowed is not None:
            scores = np.where(allowed, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return (weights.reshape(batch, kv_heads, -1, keys) @ v).reshape(q.shape)

    def own_layout(self, problem: Problem, x: Any) -> Any:
        """An array of shape (B, H, L, D) as `attend` takes it."""
        return x

    def layer(self, kind: str, peer: bool, *, shape: tuple[int, ...] = (4, 64, 128), **settings: Any) -> Any:
        """A layer on its input: a function and its arguments, the input last; None where there is no such peer."""
        raise NotImplementedError


def sizes_of(kind: str, shape: tuple[int, ...]) -> dict[str, int]:
    """The settings of a layer that follow from its input."""
    return {"channels": 32} if kind == "SaganAttention" else {"channels": shape[-1], "num_heads": 4}


class Torch(Library):
    """PyTorch: eager, compiled for fixed sizes, or for open ones."""

    name = "torch"

    def array(self, x: Any) -> Any:
        import torch

        return torch.from_numpy(x)

    def bind(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Call:
        import torch

        if mode != "eager":
            torch._dynamo.reset()
            function = torch.compile(function, dynamic=mode == "open")
        if not leaves:
            return lambda: without_gradients(function, arguments)
        parameters = [*function.parameters()] if isinstance(function, torch.nn.Module) else []
        of = [*(x.requires_grad_() for x in arguments[:leaves]), *parameters]
        d_output = torch.randn_like(function(*arguments))
        return lambda: torch.autograd.grad(function(*arguments), of, d_output)

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, allowed: Any, bias: Any) -> Any:
        import torch

        options = {"is_causal": problem.rule == "causal", "enable_gqa": problem.heads != problem.kv_heads}
        rate = 0.1 if problem.rule == "dropout" else 0.0
        mask = allowed if bias is None else bias
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, **options)

    def layer(self, kind: str, peer: bool, *, shape: tuple[int, ...] = (4, 64, 128), **settings: Any) -> Any:
        import torch

        x, rate = self.draw(*shape), settings.get("dropout", 0.0)
        if not peer:
            layer = find(kind, "attention_torch")(**sizes_of(kind, shape), **settings)
        elif kind == "EncoderLayer":
            options = {"dropout": rate, "activation": "gelu", "batch_first": True, "norm_first": True}
            layer = torch.nn.TransformerEncoderLayer(shape[-1], 4, settings["inner"], **options)
        elif kind == "MultiHeadAttention":
            attention = torch.nn.MultiheadAttention(shape[-1], 4, batch_first=True)
            return (lambda x: attention(x, x, x, need_weights=False)[0]), [x]
        else:
            return None
        return layer.train(rate > 0), [x]


def without_gradients(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Call a function of PyTorch, and record nothing."""
    import torch

    with torch.no_grad():
        return function(*arguments)


class Jax(Library):
    """JAX: jitted, or eager."""

    name = "jax"

    def array(self, x: Any) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(x)

    def bind(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Call:
        import jax

        inner = function
        if leaves:
            d_output = self.draw(*jax.eval_shape(inner, *arguments).shape)
            weighted = lambda d, *rest: (inner(*rest) * d).sum()  # noqa: E731
            function = jax.grad(weighted, argnums=tuple(range(1, leaves + 1)))
            arguments = [d_output, *arguments]
        program = jax.jit(function) if mode == "jit" else function
        return lambda: jax.block_until_ready(program(*arguments))

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, allowed: Any, bias: Any) -> Any:
        import jax

        options = {"bias": bias, "mask": allowed, "is_causal": problem.rule == "causal"}
        return jax.nn.dot_product_attention(q, k, v, **options)

    def own_layout(self, problem: Problem, x: Any) -> Any:
        return x.transpose(0, 2, 1, 3).copy()

    def layer(self, kind: str, peer: bool, *, shape: tuple[int, ...] = (4, 64, 128), **settings: Any) -> Any:
        if peer:
            return None
        if kind == "SaganAttention":
            shape = (shape[0], *shape[2:], shape[1])
        layer = find(kind, "attention_jax").init(0, **sizes_of(kind, shape), **settings)
        return (lambda layer, x: layer(x)), [layer, self.draw(*shape)]


class TensorFlow(Library):
    """TensorFlow, with Keras' attention: a graph of fixed or of open sizes, or XLA."""

    name = "tensorflow"

    def array(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.constant(x)

    def bind(self, function: Callable[..., Any], arguments: list[Any], mode: str, leaves: int) -> Call:
        import tensorflow as tf

        def gradients(*arguments: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arguments[:leaves])
                output = function(*arguments)
            return tape.gradient(output, arguments[:leaves])

        program = gradients if leaves else function
        if mode != "eager":
            opened = [tf.TensorSpec([None] * x.ndim, x.dtype) for x in arguments] if mode == "open" else None
            program = tf.function(program, opened, autograph=False, jit_compile=mode == "xla")
        return lambda: program(*arguments)

    def attend(self, problem: Problem, q: Any, k: Any, v: Any, allowed: Any, bias: Any) -> Any:
        import keras

        options = {"bias": bias, "mask": allowed, "is_causal": problem.rule == "causal"}
        return keras.ops.dot_product_attention(q, k, v, **options)

    def own_layout(self, problem: Problem, x: Any) -> Any:
        return x.repeat(problem.heads // x.shape[1], axis=1).transpose(0, 2, 1, 3).copy()

    def layer(self, kind: str, peer: bool, *, shape: tuple[int, ...] = (4, 64, 128), **settings: Any) -> Any:
        import keras

        if kind == "SaganAttention":
            shape = (shape[0], *shape[2:], shape[1])
        x = self.draw(*shape)
        if not peer:
            layer = find(kind, "attention_keras")(**sizes_of(kind, shape), **settings)
            return layer, [x]
        own = keras.layers.MultiHeadAttention(4, shape[-1] // 4)
        return ((lambda x: own(x, x)), [x]) if kind == "MultiHeadAttention" else None


LIBRARIES: dict[str, type[Library]] = {each.name: each for each in (Library, Torch, Jax, TensorFlow)}


def allowed_pairs(problem: Problem, extra: Any) -> Any:
    """The mask of a rule as a boolean array of NumPy, for a library's own attention; None where it needs none."""
    import numpy as np

    i, j = np.arange(problem.queries)[:, None], np.arange(problem.keys)[None]
    match problem.rule:
        case "window":
            return ((i >= j) & (i - j < 256))[None, None]
        case "last":
            return (j <= i + problem.keys - problem.queries)[None, None]
        case "lengths":
            return (j < extra[:, None])[:, None, None, :]
        case "segments":
            return (extra[:, :, None] == extra[:, None, :])[:, None]
    return None


def extra_of(problem: Problem) -> Any:
    """The array of a rule, of NumPy: lengths, ids of segments, a bias or sinks; None where it has none."""
    import numpy as np

    batch, heads, _, queries, keys, _, rule = problem
    match rule:
        case "lengths":
            return np.linspace(keys // 4, keys, batch).astype(np.int32)
        case "segments":
            return np.broadcast_to(np.arange(keys, dtype=np.int32) // (keys // 4), (batch, keys)).copy()
        case "bias":
            return np.random.default_rng(3).standard_normal((1, heads, queries, keys), dtype=np.float32)
        case "sinks":
            return np.linspace(-1, 1, heads).astype(np.float32)
    return None


def attention_call(lib: Library, problem: Problem, mode: str, *, leaves: int, peer: bool) -> Call | None:
    """A call of attention, of this project or the library's own; None where that cannot do it."""
    import numpy as np

    if peer and (problem.rule == "sinks" or (problem.rule == "dropout" and lib.name != "torch")):
        return None
    random, extra = np.random.default_rng(0), extra_of(problem)
    batch, heads, kv_heads, queries, keys, width, rule = problem
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    arrays = [random.standard_normal((batch, *shape, width), dtype=np.float32) for shape in shapes]
    if not peer:
        attention, options = find("scaled_dot_product_attention"), OPTIONS[rule]
        arguments = [lib.array(x) for x in (*arrays, extra) if x is not None]
        return lib.bind(
            lambda q, k, v, extra=None: attention(q, k, v, **options(problem, extra)), arguments, mode, leaves
        )
    arrays = [lib.own_layout(problem, x) for x in arrays]
    allowed = allowed_pairs(problem, extra)
    if rule == "bias":
        return lib.bind(
            lambda q, k, v, bias: lib.attend(problem, q, k, v, None, bias),
            [lib.array(x) for x in (*arrays, extra)],
            mode,
            leaves,
        )
    arguments = [lib.array(x) for x in (*arrays, allowed) if x is not None]
    return lib.bind(lambda q, k, v, allowed=None: lib.attend(problem, q, k, v, allowed, None), arguments, mode, leaves)


def rotary(lib: Library) -> Any:
    """Rotary positions of 8 heads: a function and its arguments."""
    import numpy as np

    return find("rotary_embedding"), [lib.draw(1, 8, 512, 64), lib.array(np.arange(512, dtype=np.int32))]


def cached(lib: Library, *, attends: bool) -> Any:
    """A position that is appended to a cache, and a query that attends to it: a function and its arguments."""
    append, mask_of, attention = find("append"), find("cache_mask"), find("scaled_dot_product_attention")
    cache = find("empty_cache")((2,), 8, 1024, 64, xp=lib.namespace)

    def step(cache: Any, x: Any) -> Any:
        cache = append(cache, x, x)
        return attention(x, cache.key, cache.value, mask=mask_of(cache)) if attends else cache

    return step, [cache, lib.draw(2, 8, 1, 64)]


def generation(lib: Library, mode: str) -> Call:
    """A text of 8 tokens, of a small language model."""
    import numpy as np

    model = find("Decoder", "attention_core.layers", "attention_models")(256, 64, 4, 128, num_layers=2)
    parameters = model.init(0, xp=lib.namespace)
    prompt = lib.array(np.arange(16, dtype=np.int32)[None])
    generate = find("generate", "attention_core.layers", "attention_models")
    return lambda: generate(model, parameters, prompt, max_new_tokens=8, mode=mode)


MAKE_ARRAY = {
    "numpy": "import numpy; x = numpy.ones((1, 1, 8, 16), dtype=numpy.float32)",
    "torch": "import torch; x = torch.ones(1, 1, 8, 16)",
    "jax": "import jax; x = jax.numpy.ones((1, 1, 8, 16))",
}


def first_call(lib: Library, peer: bool) -> Call:
    """A new process that imports the library and, unless it is the peer, calls attention for the first time."""
    script = MAKE_ARRAY[lib.name]
    if not peer:
        script += "; import attention_core as core; core.scaled_dot_product_attention(x, x, x)"
    return lambda: subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def twelve_calls(lib: Library, mode: str, peer: bool) -> Call:
    """Compile and run twelve causal calls, each on the result of the last, anew in each call."""
    problem = Problem(2, 8, 8, 256, 256, 64, "causal")
    attention = find("scaled_dot_product_attention")
    q, k, v = (lib.draw(*(2, 256, 8, 64) if peer and lib.name != "torch" else (2, 8, 256, 64)) for _ in range(3))

    def chain(q: Any, k: Any, v: Any) -> Any:
        for _ in range(12):
            q = lib.attend(problem, q, k, v, None, None) if peer else attention(q, k, v, is_causal=True)
        return q

    def compile_and_call() -> Any:
        if lib.name == "torch":
            import torch

            torch._inductor.config.force_disable_caches = True
        return lib.bind(lambda *arrays: chain(*arrays), [q, k, v], mode, 0)()

    return compile_and_call


def call_of(cell: Cell, *, peer: bool) -> Call | None:
    """The call of a cell, of this project or the library's own; None where that has none."""
    lib, gradients = LIBRARIES[cell.library](), cell.direction == "both"
    if cell.work in PROBLEMS:
        problem = PROBLEMS[cell.work][0]
        return attention_call(lib, problem, cell.mode, leaves=3 if gradients else 0, peer=peer)
    if cell.work in WHOLE:
        return WHOLE[cell.work][0](lib, cell.mode, peer)
    found = OTHERS[cell.work][0](lib, peer)
    return found and lib.bind(*found, cell.mode, len(found[1]) if gradients else 0)


class Time(NamedTuple):
    """Seconds of a call."""

    processor: float
    wall: float

    @classmethod
    def now(cls) -> "Time":
        """Both clocks; the processor's has all threads, and processes that were waited for."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(time.process_time() + used.ru_utime + used.ru_stime, time.perf_counter())


def time_of(call: Call, *, least: float = 0.01, samples: int = 3) -> Time:
    """The least time of a call in some samples; a sample is one call, or as many as last `least` seconds."""
    found, count = [], 1
    while len(found) < samples:
        start = Time.now()
        for _ in range(count):
            call()
        used = Time(*(after - before for before, after in zip(start, Time.now(), strict=True)))
        if used.wall < least and not found:
            count = max(count * 2, int(count * least / max(used.wall, 1e-6)) + 1)
            continue
        found.append(Time(*(seconds / count for seconds in used)))
        if used.wall > 1:
            break
    return Time(*map(min, zip(*found, strict=True)))


def peak_memory(call: Call) -> int:
    """By how many bytes resident memory grew at most during a call, as Linux counts it."""
    gc.collect()
    before = told("VmRSS")
    with open("/proc/self/clear_refs", "w") as maximum:
        maximum.write("5")  # which begins a new maximum
    call()
    return max(told("VmHWM") - before, 0)


def told(name: str) -> int:
    """A number of bytes of this process that Linux tells in KiB."""
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def timed(cell: Cell, peer: bool, known: dict[Any, Call | None]) -> dict[str, Any]:
    """Time a cell, which is kept prepared until another one comes."""
    if next(iter(known), (cell,))[0] != cell:
        known.clear()
    if (cell, peer) not in known:
        known[cell, peer] = call = call_of(cell, peer=peer)
        if call is not None and cell.work not in WHOLE:
            call(), call()
    call = known[cell, peer]
    return {} if call is None else time_of(call)._asdict()


def orders() -> Iterator[dict[str, Any]]:
    """The orders of the process that started this one."""
    return map(json.loads, sys.stdin)


def main(library: str) -> None:
    """Answer orders until there are no more; what libraries print goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if library == "torch":
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    known: dict[Any, Call | None] = {}
    for order in orders():
        try:
            answer = timed(Cell(*order["cell"]), order["peer"], known)
        except Exception as error:
            known.clear()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
