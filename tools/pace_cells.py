"""The calls that `tools/pace.py` times, as data, and the process that measures them in one tree.

``python tools/pace_cells.py LIBRARY`` reads orders and writes answers, a line of JSON each. It measures the packages
on its path, which may be those of another commit: a public name is looked for wherever it stands or stood.
"""

import ctypes
import functools
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pace_libraries import LIBRARIES, Library, Problem, Work, find

Call = Callable[[], Any]


class Cell(NamedTuple):
    """A call of a library, in a mode, forward or with gradients ("both"): of `PROBLEMS`, `OTHERS` or `WHOLE`."""

    library: str
    mode: str
    direction: str
    work: str

    def __str__(self) -> str:
        return " ".join(self)


EVERY = ("numpy eager", "torch eager", "jax jit", "tensorflow graph")
FRAMEWORKS = EVERY[1:]
COMPILED = ("torch compiled", "tensorflow xla")
OPEN = ("torch open", "tensorflow open")  # programs for all sizes
LAYERS = (*FRAMEWORKS, "torch compiled")

# name: problem, where forward, where with gradients
PROBLEMS: dict[str, tuple[Problem, tuple[str, ...], tuple[str, ...]]] = {
    "8 full": (Problem(1, 1, 1, 8, 8, 16, "full"), (*EVERY, *COMPILED), ()),
    "8 causal": (Problem(1, 1, 1, 8, 8, 16, "causal"), EVERY, FRAMEWORKS[:1]),
    "32 lengths": (Problem(2, 4, 4, 32, 32, 32, "lengths"), EVERY, FRAMEWORKS[:1]),
    "128 full": (Problem(16, 12, 12, 128, 128, 64, "full"), EVERY, FRAMEWORKS),
    "128 causal": (Problem(32, 12, 12, 128, 128, 64, "causal"), (*EVERY, *COMPILED), (*FRAMEWORKS, *COMPILED)),
    "128 lengths": (Problem(16, 12, 12, 128, 128, 64, "lengths"), (*EVERY, *OPEN), FRAMEWORKS),
    "128 bias": (Problem(16, 12, 12, 128, 128, 64, "bias"), EVERY, FRAMEWORKS),
    "128 dropout": (Problem(8, 4, 4, 128, 128, 16, "dropout"), FRAMEWORKS, FRAMEWORKS),
    "128 segments": (Problem(16, 12, 12, 128, 128, 64, "segments"), EVERY, ()),
    "128 sinks": (Problem(16, 12, 12, 128, 128, 64, "sinks"), EVERY, ()),
    "512 causal": (Problem(4, 12, 12, 512, 512, 64, "causal"), EVERY, FRAMEWORKS),
    "512 causal grouped": (Problem(1, 32, 8, 512, 512, 128, "causal"), EVERY, ()),
    "512 lengths": (Problem(2, 12, 12, 512, 512, 64, "lengths"), EVERY, ()),
    "1024 full": (Problem(1, 8, 8, 1024, 1024, 64, "full"), EVERY, ()),
    "1024 reproducible": (Problem(1, 8, 8, 1024, 1024, 64, "reproducible"), EVERY, FRAMEWORKS),
    "decode reproducible": (Problem(1, 8, 8, 1, 4096, 64, "reproducible"), EVERY[:2], ()),
    "1024 segments": (Problem(1, 4, 4, 1024, 1024, 64, "segments"), FRAMEWORKS, ()),
    "2048 causal": (Problem(1, 4, 4, 2048, 2048, 64, "causal"), (*EVERY, *COMPILED), FRAMEWORKS[:1]),
    "2048 window": (Problem(1, 4, 4, 2048, 2048, 64, "window"), EVERY, FRAMEWORKS),
    "4096 window": (Problem(1, 4, 4, 4096, 4096, 64, "window"), ("torch compiled", *OPEN), ()),
    "8192 window": (Problem(1, 1, 1, 8192, 8192, 64, "window"), EVERY, ()),
    "512 bfloat16": (Problem(2, 12, 12, 512, 512, 64, "causal", "bfloat16"), LAYERS, FRAMEWORKS[:1]),
    "1024 bfloat16": (Problem(1, 8, 8, 1024, 1024, 64, "causal", "bfloat16"), FRAMEWORKS[:1], FRAMEWORKS[:1]),
    "decode": (Problem(1, 16, 16, 1, 2048, 64, "full"), EVERY, ()),
    "decode grouped": (Problem(1, 32, 8, 1, 4096, 128, "full"), EVERY, ()),
    "decode lengths": (Problem(4, 16, 16, 1, 2048, 64, "lengths"), (*EVERY, *COMPILED), ()),
    "decode lengths grouped": (Problem(4, 32, 8, 1, 2048, 128, "lengths"), (*EVERY, "torch open"), ()),
    "chunk of 64 on 4096": (Problem(1, 32, 8, 64, 4096, 128, "last"), EVERY, ()),
}
# The class of this project that a rule needs, which is looked for outside of what is compiled.
KINDS = {
    "window": "SlidingWindow",
    "last": "Causal",
    "lengths": "KeyLengths",
    "segments": "Segments",
    "dropout": "Dropout",
}
# The options of ours by rule; `extra` is the array of the rule, if it has one.
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "full": lambda problem, kind: {},
    "reproducible": lambda problem, kind: {"arithmetic": "reproducible"},
    "causal": lambda problem, kind: {"is_causal": True},
    "window": lambda problem, kind: {"mask": kind(left=255, right=0)},
    "last": lambda problem, kind: {"mask": kind(offset=problem.keys - problem.queries)},
    "lengths": lambda problem, kind, extra: {"mask": kind(extra)},
    "segments": lambda problem, kind, extra: {"mask": kind(extra, extra)},
    "bias": lambda problem, kind, extra: {"bias": extra},
    "sinks": lambda problem, kind, extra: {"sinks": extra},
    "dropout": lambda problem, kind: {"dropout": kind(0.1, 7)},
}
# name: what makes the function and its arguments, where forward, where with gradients
OTHERS: dict[str, tuple[Callable[[Library, bool], Work | None], tuple[str, ...], tuple[str, ...]]] = {
    "MultiHeadAttention": (lambda lib, peer: lib.layer("MultiHeadAttention", peer), LAYERS, FRAMEWORKS),
    "EncoderLayer": (lambda lib, peer: lib.layer("EncoderLayer", peer), LAYERS, FRAMEWORKS),
    "EncoderLayer dropout": (lambda lib, peer: lib.layer("EncoderLayer", peer, 0.1), (), FRAMEWORKS[:1]),
    "DecoderLayer": (lambda lib, peer: lib.layer("DecoderLayer", peer), FRAMEWORKS[:2], FRAMEWORKS[:1]),
    "SaganAttention": (lambda lib, peer: lib.layer("SaganAttention", peer), FRAMEWORKS, FRAMEWORKS[:1]),
    "rotary_embedding": (lambda lib, peer: None if peer else rotary(lib), EVERY, ()),
    "append": (lambda lib, peer: None if peer else cached(lib, with_query=False), EVERY, ()),
    "append and one query": (lambda lib, peer: None if peer else cached(lib, with_query=True), EVERY, ()),
}
# name: what makes a call that compiles, starts or writes text by itself, and where
WHOLE: dict[str, tuple[Callable[[Library, str, bool], Call | None], tuple[str, ...]]] = {
    "generate 8 tokens": (lambda lib, mode, peer: None if peer else generation(lib, mode), EVERY),
    "import and first call": (lambda lib, mode, peer: first_call(lib, peer), EVERY[:3]),
    "compile 12 calls": (lambda lib, mode, peer: twelve_calls(lib, mode, peer), ("torch compiled", *EVERY[2:])),
}
CELLS = tuple(
    Cell(*column.split(), direction, work)
    for works in (PROBLEMS, OTHERS, WHOLE)
    for work, (_, *columns) in works.items()
    for direction, places in zip(("forward", "both"), columns, strict=False)
    for column in places
)
# What would have seen each loss of speed that was found so far, in three minutes.
QUICK = (
    "numpy eager forward 8 causal",
    "torch eager forward 8 full",
    "torch eager both 128 dropout",
    "torch open forward 4096 window",
    "jax jit forward 128 causal",
    "jax jit forward decode lengths",
    "jax jit forward chunk of 64 on 4096",
    "tensorflow graph forward 128 bias",
    "tensorflow graph forward 128 causal",
    "tensorflow graph forward 512 causal",
    "tensorflow graph forward decode lengths",
    "tensorflow graph forward decode lengths grouped",
)


def extra_of(problem: Problem) -> list[Any]:
    """The array of a rule, of NumPy: lengths, ids of segments, a bias or sinks; nothing where it has none."""
    import numpy as np

    batch, heads, _, queries, keys, _, rule, _ = problem
    match rule:
        case "lengths":
            return [np.linspace(keys // 4, keys, batch).astype(np.int32)]
        case "segments":
            return [np.tile(np.arange(keys, dtype=np.int32) // (keys // 4), (batch, 1))]
        case "bias":
            return [np.random.default_rng(3).standard_normal((1, heads, queries, keys), dtype=np.float32)]
        case "sinks":
            return [np.linspace(-1, 1, heads).astype(np.float32)]
    return []


def attention(lib: Library, problem: Problem, peer: bool) -> Work | None:
    """Attention of this project, or the library's own; None where that cannot do it."""
    import numpy as np

    batch, heads, kv_heads, queries, keys, width, rule, dtype = problem
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    random, extra = np.random.default_rng(0), extra_of(problem)
    arrays = [random.standard_normal((batch, *shape, width), dtype=np.float32) for shape in shapes]
    options = functools.partial(OPTIONS[rule], problem, find(KINDS[rule]) if rule in KINDS else None)
    if not peer:
        function = find("scaled_dot_product_attention")
        inputs = [*(lib.array(x, dtype) for x in arrays), *map(lib.array, extra)]
        return (lambda *x: function(*x[:3], **options(*x[3:]))), inputs
    if rule == "sinks" or (rule == "dropout" and lib.name != "torch"):
        return None
    if (mask := options(*extra).get("mask")) is not None:
        allowed = mask.to_array(queries, keys, xp=np)
        extra = [allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)]
    arrays = [lib.array(lib.layout(problem, x), dtype) for x in arrays]
    return (lambda *x: lib.attend(problem, *x)), [*arrays, *map(lib.array, extra)]


def rotary(lib: Library) -> Work:
    """Rotary positions of 8 heads."""
    import numpy as np

    return find("rotary_embedding"), [lib.draw(1, 8, 512, 64), lib.array(np.arange(512, dtype=np.int32))]


def cached(lib: Library, *, with_query: bool) -> Work:
    """A position that is appended to a cache, and a query that attends to it."""
    append, mask_of, function = find("append"), find("cache_mask"), find("scaled_dot_product_attention")

    def step(cache: Any, x: Any) -> Any:
        cache = append(cache, x, x)
        return function(x, cache.key, cache.value, mask=mask_of(cache)) if with_query else cache

    return step, [find("empty_cache")((2,), 8, 1024, 64, xp=lib.namespace), lib.draw(2, 8, 1, 64)]


def generation(lib: Library, mode: str) -> Call:
    """A text of 8 tokens, of a small language model."""
    import numpy as np

    model = find("Decoder", "attention_core.layers", "attention_models")(256, 64, 4, 128, num_layers=2)
    parameters, prompt = model.init(0, xp=lib.namespace), lib.array(np.arange(16, dtype=np.int32)[None])
    generate = find("generate", "attention_core.layers", "attention_models")
    call = functools.partial(generate, model, parameters, prompt, max_new_tokens=8, mode=mode)
    call()  # which compiles
    return call


def first_call(lib: Library, peer: bool) -> Call:
    """A new process that imports the library and, unless it is the peer, calls attention for the first time."""
    namespace = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy"}[lib.name]
    script = f"import {namespace} as xp; x = xp.ones((1, 1, 8, 16), dtype=xp.float32)"
    if not peer:
        script += "; import attention_core as core; core.scaled_dot_product_attention(x, x, x)"
    return lambda: subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def twelve_calls(lib: Library, mode: str, peer: bool) -> Call:
    """Compile and run twelve causal calls, each on the result of the last, anew in each call, in a warm compiler."""
    function, arguments = attention(lib, Problem(2, 8, 8, 256, 256, 64, "causal"), peer)
    if lib.name == "torch":
        import torch

        torch._inductor.config.force_disable_caches = True

    def compile_and_call() -> Any:
        def chain(q: Any, k: Any, v: Any) -> Any:
            for _ in range(12):
                q = function(q, k, v)
            return q

        return lib.program(chain, arguments, mode, 0)(*arguments)

    compile_and_call()  # the first compilation of a process loads the compiler
    return compile_and_call


def call_of(cell: Cell, *, peer: bool) -> Call | None:
    """The call of a cell, of this project or the library's own; None where that has none."""
    lib = LIBRARIES[cell.library]()
    if cell.work in WHOLE:
        return WHOLE[cell.work][0](lib, cell.mode, peer)
    is_other = cell.work in OTHERS
    found = OTHERS[cell.work][0](lib, peer) if is_other else attention(lib, PROBLEMS[cell.work][0], peer)
    if found is None:
        return None
    function, arguments = found
    leaves = min(len(arguments), 3) if cell.direction == "both" else 0
    program = lib.program(function, arguments, cell.mode, leaves)
    program(*arguments)
    return lambda: program(*arguments)


class Time(NamedTuple):
    """Seconds of a call."""

    processor: float
    wall: float

    @classmethod
    def now(cls) -> "Time":
        """Both clocks; the processor's has all threads, and processes that were waited for."""
        waited = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(time.process_time() + waited.ru_utime + waited.ru_stime, time.perf_counter())


def time_of(call: Call, *, least: float = 0.01, samples: int = 3) -> Time:
    """The least time of a call in some samples, each one call or as many as last `least` seconds."""
    found: list[Time] = []
    count = 1
    while len(found) < samples and not (found and found[0].wall > 1):
        start = Time.now()
        for _ in range(count):
            call()
        used = [after - before for before, after in zip(start, Time.now(), strict=True)]
        if used[1] < least and not found:
            count = max(count * 2, int(count * least / used[1]) + 1)
        else:
            found.append(Time(*(seconds / count for seconds in used)))
    return Time(*(float(f"{min(each):.4g}") for each in zip(*found, strict=True)))


def peak_memory(call: Call) -> int:
    """By how many bytes resident memory grew at most during a call, as Linux counts it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back
    before = told("VmRSS")
    with open("/proc/self/clear_refs", "w") as maximum:
        maximum.write("5")  # which begins a new maximum
    call()
    return max(told("VmHWM") - before, 0)


def told(name: str) -> int:
    """A number of bytes of this process that Linux tells in KiB."""
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def describe_program(library: str, mode: str, direction: str, rule: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Time and peak memory of one program at some lengths, how many graphs it has by then, and operations."""
    lib, rows = LIBRARIES[library](), []
    program = None
    for length in lengths:
        function, arguments = attention(lib, Problem(1, 2, 2, length, length, 64, rule), False)
        program = program or lib.program(function, arguments, mode, 3 if direction == "both" else 0)
        call = functools.partial(program, *arguments)
        call()
        graphs, operations = (0, 0) if mode == "eager" else lib.counts(program, arguments)
        rows.append(time_of(call)._asdict() | {"memory": peak_memory(call), "graphs": graphs, "operations": operations})
    return rows


def time_cell(cell: Cell, peer: bool, known: dict[Any, Call | None]) -> dict[str, Any]:
    """Time a cell, which is kept ready until another one comes."""
    if (cell, not peer) not in known:
        known.clear()
    if (cell, peer) not in known:
        known[cell, peer] = call_of(cell, peer=peer)
        for each in filter(None, known.values()) if cell.work not in WHOLE else ():
            each()  # PyTorch forgets one that was compiled before the other
    call = known[cell, peer]
    return {} if call is None else time_of(call)._asdict()


def main(library: str) -> None:
    """Answer orders until there are no more; what libraries print goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if library == "torch":
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    known: dict[Any, Call | None] = {}
    for order in map(json.loads, sys.stdin):
        try:
            if "program" in order:
                answer: Any = describe_program(*order["program"])
            else:
                answer = time_cell(Cell(*order["cell"]), order["peer"], known)
        except Exception as error:
            known.clear()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
