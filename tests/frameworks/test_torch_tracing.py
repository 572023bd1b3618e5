"""What PyTorch compiles, exports or vectorizes gives what eager gives."""

import contextlib
import dataclasses
import functools
import importlib
import subprocess
import sys

import numpy as np
import pytest
from tracing_helpers import (
    CASES,
    FEW,
    LENGTHS,
    QKV,
    SEED,
    SIXTEEN,
    assert_same,
    attend_some,
    case,
    compiled,
    leaves,
    module_of,
    sized,
)

import attention_core as ac
from attention_core._arithmetic import ARITHMETICS
from attention_core._arithmetic.angles import Rotation
from attention_core._backend import _calls
from attention_core.backend import get_backend
from attention_models import Decoder, generate

pytestmark = [
    pytest.mark.needs("torch"),
    # array-api-compat remembers the namespace of a type in a cache, which PyTorch traces through, and says so once.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
]


@pytest.fixture(scope="module")
def torch():
    library = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    return library


INSIDE = {  # of other cases, of those of 16 bits, or of machine code below
    "everything", "array", "softcap", "gelu", "silu", "linear", "layer norm", "feed-forward", "encoder", "embed",
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [*((name, None) for name in CASES if name not in INSIDE), *SIXTEEN])
def test_torch_compile_makes_one_graph(torch, name, dtype):
    function, arrays = case(name, "torch", dtype)
    compiler = "eager" if dtype is None else "aot_eager"
    assert_same("torch", compiled(torch, function, compiler)(*arrays), function(*arrays))


def test_torch_compile_takes_a_call_as_one_step(torch):
    """Of arguments of all kinds; settings of the block of code are those of the program."""
    layer = importlib.import_module("attention_torch").MultiHeadAttention(8, 2, seed=0).eval()
    model = importlib.import_module("attention_models.torch").Decoder(9, 8, 2, 16, num_layers=3, seed=0).eval()
    masks = [ac.Causal() & ac.KeyLengths(torch.tensor([3, 2])), torch.arange(4) < 3]
    steps = []

    def record(graph, _):
        steps.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def attend(x, heads):
        first = ac.scaled_dot_product_attention(heads, heads, heads, mask=masks[0], scale=0.5, return_logsumexp=True)
        return layer(x, mask=masks[1]), first.output, first.logsumexp, model(x[..., 0].int() + 1)

    x, heads = torch.linspace(-1, 1, 64).reshape(2, 4, 8), torch.linspace(-2, 1, 64).reshape(2, 2, 4, 4)
    program = torch.compile(attend, fullgraph=True, backend=record)
    for found, expected in zip(program(x, heads), attend(x, heads), strict=True):
        torch.testing.assert_close(found, expected)
    assert [step.__name__ for step in steps].count("_run") == 3
    assert len(steps) < 13
    heads[1, :, 3, 0] = torch.nan  # masked
    assert torch.isfinite(program(x, heads)[1][:, :, :3]).all()
    with ac.config_context(assume_finite=True):
        program(x, heads)
    assert [step.__name__ for step in steps].count("_run") == 6


def test_torch_compile_loads_the_adapter_before_it_reads_a_first_call(torch, monkeypatch):
    """To read all of a call takes three times as long as to compile it as one step.

    What was read is private, and is forgotten here: in a process of its own, no fault that is planted would show.
    """
    targets = []
    monkeypatch.delitem(_calls._read, "scaled_dot_product_attention", raising=False)

    def record(graph, _):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    program = torch.compile(lambda x: ac.scaled_dot_product_attention(x, x, x), fullgraph=True, backend=record)
    program(torch.ones(1, 2, 4, 8))
    assert [target.__name__ for target in targets] == ["_run"]


def test_torch_compile_calls_what_users_wrap_around_a_function(torch):
    """As `functools.wraps` hands on all that stands in a function."""

    @functools.wraps(ac.scaled_dot_product_attention)
    def twice(*arguments, **options):
        return 2 * ac.scaled_dot_product_attention(*arguments, **options)

    x = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8)
    program = torch.compile(lambda x: twice(x, x, x), fullgraph=True, backend="eager")
    torch.testing.assert_close(program(x), twice(x, x, x))


def test_torch_compile_leaves_wrong_arguments_to_an_eager_call(torch):
    x = torch.ones(2, 3, 4)
    ac.scaled_dot_product_attention(x, x, x)  # the first call finds the adapter
    program = torch.compile(lambda x, y: ac.scaled_dot_product_attention(x, y, y), backend="eager")
    with pytest.raises(ValueError):
        program(x, x[..., 1:])
    torch.testing.assert_close(program(x, x), x)


def test_torch_compile_down_to_machine_code(torch):
    function, arrays = case("everything", "torch")
    assert_same("torch", get_backend("torch").compile(function)(*arrays), function(*arrays))


COLD = """
import os
import torch, torch._dynamo
from torch.utils.checkpoint import checkpoint
from attention_core import Dropout, KeyLengths, scaled_dot_product_attention

def attend(x, *others, **options):
    return scaled_dot_product_attention(x, x, x, **options)

def causal(x, lengths, seed):
    return attend(x, is_causal=True)

def masked(x, lengths, seed):
    return attend(x, mask=KeyLengths(lengths))

def checkpointed(*arrays):
    return checkpoint(masked, *arrays, use_reentrant=False)

def dropping(x, lengths, seed):
    return attend(x, dropout=Dropout(0.1, seed))

def exact(*arrays):
    return sum(attend(each, arithmetic="reproducible") for each in arrays)

if os.fork() == 0:  # the first call of a process is cast, too
    with torch.autocast("cpu", torch.bfloat16):
        print(attend(torch.ones(1, 2, 3)).dtype, flush=True)
    os._exit(0)
os.wait()
for function in (causal, checkpointed, dropping, exact):
    if os.fork() == 0:
        x = torch.ones(2, 2, 3, 4)
        arrays = x, torch.tensor([3, 1]), torch.tensor([7, 9])
        if function is exact:  # once the class of tensors is known, but not that of parameters
            arrays = x, torch.nn.Parameter(exact(x))
        print(torch.compile(function, fullgraph=True, backend="eager")(*arrays).shape, flush=True)
        os._exit(0)
    os.wait()
"""


def test_torch_compile_may_be_the_first_to_call_the_core(torch):
    """Nothing that the core remembers from earlier calls is needed to trace it, and nothing is written meanwhile."""
    run = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=False)
    assert run.stdout == "torch.bfloat16\n" + 4 * "torch.Size([2, 2, 3, 4])\n", run.stderr


def test_a_class_that_is_made_later_makes_no_program_anew(torch):
    testing = importlib.import_module("torch._dynamo.testing")
    counter = testing.CompileCounter()
    x = get_backend("torch").from_numpy(np.ones((2, 3, 4), dtype=np.float32))

    def attend(x):
        return ac.scaled_dot_product_attention(x, x, x, arithmetic="reproducible")

    attend(x)
    function = compiled(torch, attend, counter)
    function(x)
    for factor in (2.0, 3.0):
        type("Later", (torch.Tensor,), {})
        torch.compile(lambda x, factor=factor: attend(x) * factor, fullgraph=True, backend="eager")(x)
        function(x)
    assert counter.frame_count == 1


def test_one_array_that_a_program_made_may_be_both_key_and_value(torch):
    """Reproducible gradients copy an array for each of its uses; PyTorch compiles no comparison of its `id`."""
    x = get_backend("torch").from_numpy(np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4))

    def attend(x):
        made = x * 2.0
        return ac.scaled_dot_product_attention(x, made, made, arithmetic="reproducible")

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="eager")(x), attend(x))


def test_torch_compile_with_open_lengths_compiles_once(torch):
    testing = importlib.import_module("torch._dynamo.testing")
    counter = testing.CompileCounterWithBackend("aot_eager")
    function = compiled(torch, attend_some, counter, dynamic=True)
    for batch, length in ((2, 5), (4, 8), (3, 11)):
        arrays = sized(batch, length, "torch")
        expected = attend_some(*arrays)  # first: a graph is made anew once the core has learnt the names of new dtypes
        assert_same("torch", function(*arrays), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
def test_torch_compile_with_open_lengths_takes_numbers_of_settings_as_symbols(torch, arithmetic):
    """And an offset of the lengths: a plan, which is text in a program, has the numbers themselves."""
    kind = importlib.import_module("attention_torch").DecoderLayer
    layer = kind(8, 4, 6, num_key_value_heads=2, softcap=5.0, seed=0, arithmetic=arithmetic).eval()

    def attend(x, scale):
        few, more = x[:, None, 2:], x[:, None]
        mask = ac.Causal(offset=more.shape[-2] - few.shape[-2])
        return layer(x), ac.scaled_dot_product_attention(few, more, more, mask=mask, scale=scale, arithmetic=arithmetic)

    function = compiled(torch, attend, dynamic=True)
    for batch, length, scale in ((2, 5, 0.5), (3, 7, 0.3)):
        x = torch.linspace(-1, 1, batch * length * 8).reshape(batch, length, 8)
        assert_same("torch", function(x, scale), attend(x, scale))


@pytest.mark.parametrize("ragged", [False, True])
def test_torch_compile_appends_any_number_of_positions(torch, ragged):
    def step(cache, new):
        cache = ac.cache.append(cache, new, new)
        return ac.scaled_dot_product_attention(new, *cache[:2], mask=ac.cache.cache_mask(cache, new.shape[-2])), cache

    function = compiled(torch, step, dynamic=True)
    start = expected = ac.cache.empty_cache((2,), 3, 16, 4, ragged=ragged, xp=get_backend("torch").namespace)
    for count in (3, 2, 7):
        new = torch.linspace(-1, 1, 2 * 3 * count * 4).reshape(2, 3, count, 4)
        (output, start), (other, expected) = function(start, new), step(expected, new)
        assert_same("torch", (output, *start[:2]), (other, *expected[:2]))
        assert torch.equal(start.length, expected.length)


@pytest.mark.parametrize("name", FEW)
def test_torch_export(torch, name):
    function, arrays = case(name, "torch")
    program = torch.export.export(module_of(torch, function), arrays)
    assert_same("torch", program.module()(*arrays), function(*arrays))
    assert not any("attention_core" in str(node.target) for node in program.graph.nodes)  # which any reader can run


def test_an_exported_program_holds_no_address_of_a_file(torch, tmp_path):
    """Operations, plans and masks stand in it by registered names, so that private files may be renamed."""

    def attend(query, key, value):
        mask = (ac.Causal(offset=2) | ac.SlidingWindow(left=2, right=1)) & ~ac.KeyLengths(1)
        return ac.scaled_dot_product_attention(
            query, key, value, mask=mask, score_mod=ac.scores.alibi(6), implementation="blockwise"
        )

    arrays = sized(2, 5, "torch")[:3]
    program = torch.export.export(module_of(torch, attend), arrays)
    (node,) = (node for node in program.graph.nodes if "attend" in str(node.target) and len(node.args) == 2)
    text = node.args[1]
    assert "@blockwise" in text
    assert "@SlidingWindow" in text
    assert "attention_" not in text
    with pytest.raises(ValueError, match="expected masks and score modifications of attention_core"):
        node.target(list(arrays), text.replace("@SlidingWindow", "@os:system"))
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").module()
    assert_same("torch", again(*arrays), attend(*arrays))


def exported_dims(torch):
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    keys = length + 2
    return ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys}, {0: batch})


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_with_open_batch_and_length(torch, strict):
    module = module_of(torch, attend_some)
    shapes = {"arrays": exported_dims(torch)}
    program = torch.export.export(module, sized(2, 5, "torch"), dynamic_shapes=shapes, strict=strict)
    for batch, length in ((4, 9), (3, 6)):
        arrays = sized(batch, length, "torch")
        assert_same("torch", program.module()(*arrays), attend_some(*arrays))


@pytest.mark.parametrize(
    ("options", "strict"),
    [({}, True), ({}, False), ({"implementation": "blockwise"}, False), ({"arithmetic": "reproducible"}, False)],
    ids=str,
)
def test_torch_export_of_few_keys_is_for_any_length(torch, options, strict):
    """From 16 keys on, PyTorch's kernel loses no NaN, and later a call looks at its arrays, which an export may not."""
    layer = importlib.import_module("attention_torch").MultiHeadAttention(8, 2, seed=0, **options).eval()
    few, *others = (torch.linspace(-1, 1, 2 * length * 8).reshape(2, length, 8) for length in (5, 3, 15, 40, 600))
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (few,), dynamic_shapes=shapes, strict=strict).module()
    for x in others:
        assert_same("torch", program(x), layer(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_torch_jit_trace_of_any_length(torch):
    layers = importlib.import_module("attention_torch")
    layer = layers.EncoderLayer(8, 2, 6, seed=0, is_causal=True).eval()
    x = torch.linspace(-1, 1, 2 * 10 * 8).reshape(2, 10, 8)
    program = torch.jit.trace(layer, (x[:, :5],))
    for length in (5, 3, 10):
        assert_same("torch", program(x[:, :length]), layer(x[:, :length]))
    q = x.unsqueeze(0)
    with pytest.raises(ValueError):
        torch.jit.trace(lambda q: ac.scaled_dot_product_attention(q, q, q, arithmetic="reproducible"), (q,))


def plain(scores, batch, head, query, key):
    return scores


def named_alike(factor):
    """A function with the name and the module of another, as one that is defined again in a notebook."""
    return functools.wraps(plain)(lambda *arguments: plain(*arguments) * factor)


def test_functions_of_one_name_are_not_confused(torch):
    arrays = [torch.randn(1, 2, 70, 4) for _ in range(3)]
    for score_mod in (named_alike(0.5), named_alike(2.0)):
        attend = functools.partial(ac.scaled_dot_product_attention, score_mod=score_mod, implementation="blockwise")
        torch._dynamo.reset()
        assert_same("torch", torch.compile(attend, backend="eager")(*arrays), attend(*arrays))


def ahead(distance):
    """A rule of a class that is made anew, and named as before."""

    @dataclasses.dataclass(frozen=True, eq=False)
    class Ahead(ac.masks.Mask):
        def allowed(self, at, /, *, xp):
            return xp.less(at.key, at.query + distance)

    return Ahead()


@dataclasses.dataclass(frozen=True, eq=False)
class Near(ac.masks.Mask):
    """Keys at most so far away."""

    distance: float

    def allowed(self, at, /, *, xp):
        return abs(at.key - at.query) <= self.distance


@pytest.mark.parametrize("distance", [2.5, float("inf")])
def test_a_rule_may_hold_any_number(torch, distance):
    arrays = [torch.randn(1, 2, 20, 4) for _ in range(3)]
    attend = functools.partial(ac.scaled_dot_product_attention, mask=Near(distance), implementation="blockwise")
    assert_same("torch", torch.compile(attend, backend="eager")(*arrays), attend(*arrays))


def test_rules_whose_classes_have_one_name_are_not_confused(torch):
    arrays = [torch.randn(1, 2, 20, 4) for _ in range(3)]
    functions = [functools.partial(ac.scaled_dot_product_attention, mask=ahead(distance)) for distance in (1, 9)]
    torch._dynamo.reset()
    programs = [torch.compile(lambda *arrays, f=function: f(*arrays), backend="eager") for function in functions]
    for program, function in zip(2 * programs, 2 * functions, strict=True):
        assert_same("torch", program(*arrays), function(*arrays))


@pytest.mark.parametrize("implementation", ["auto", "dense", "blockwise"])
@pytest.mark.parametrize("mask", [None, ac.Causal(), ac.KeyLengths(5), ac.SlidingWindow(left=3, right=0)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("lengths", [(6, 20), (700, 800)])
def test_tensors_without_values_have_the_shapes_of_results_and_gradients(torch, mask, implementation, device, lengths):
    mode = torch._subclasses.fake_tensor.FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
    with mode:
        shapes = [(2, 4, lengths[0], 8), *[(2, 4, lengths[1], 8)] * 2]
        arrays = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
        output = ac.scaled_dot_product_attention(*arrays, mask=mask, implementation=implementation)
        gradients = torch.autograd.grad(output.sum(), arrays)
    assert [x.shape for x in (output, *gradients)] == [arrays[0].shape, *(x.shape for x in arrays)]


def test_torch_fx_names_what_traces_attention(torch):
    fx = importlib.import_module("torch.fx")
    with pytest.raises(TypeError):
        fx.symbolic_trace(lambda x: ac.scaled_dot_product_attention(x, x, x))
    layer = importlib.import_module("attention_torch").EncoderLayer(8, 2, 6)
    with pytest.raises(TypeError):
        fx.symbolic_trace(torch.nn.Sequential(layer))


DISTRIBUTED = {
    "blocks": lambda x: ac.scaled_dot_product_attention(x, x, x, implementation="blockwise"),
    "causal": lambda x: ac.scaled_dot_product_attention(x, x, x, is_causal=True),
    "positions": lambda x: ac.functions.rotary_embedding(x, np.arange(40)),
    "cache": lambda x: ac.cache.append(ac.cache.KeyValueCache(x, x, x[0, 0, 0, 0].long()), *[x[..., :2, :]] * 2),
    **{
        name: lambda x, name=name: getattr(importlib.import_module("attention_torch"), name)(8, 2, 16)(x[:, 0])
        for name in ("EncoderLayer", "DecoderLayer")
    },
}


@pytest.mark.parametrize("call", DISTRIBUTED)
def test_a_distributed_tensor_names_local_map(torch, call):
    distributed = importlib.import_module("torch.distributed")
    tensor = importlib.import_module("torch.distributed.tensor")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
        x = tensor.distribute_tensor(torch.ones(2, 4, 40, 8), mesh, [tensor.Shard(1)])
        with pytest.raises(TypeError):
            DISTRIBUTED[call](x)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"implementation": "blockwise"}, {"arithmetic": "reproducible"}], ids=str)
def test_torch_vmap_gives_each_sample_what_it_has_alone(torch, options):
    """Also its gradients, as ensembles and differential privacy take them, and its Jacobian."""
    query, key, value, lengths, seeds = arrays = get_backend("torch").from_numpy(
        (*(x[:, :, :3] for x in QKV), LENGTHS, np.stack([SEED, SEED + 1])), dtype="float32"
    )

    def attend(query, key, value, lengths, seed):
        rules = {"mask": ac.KeyLengths(lengths), "dropout": ac.Dropout(0.25, seed)}
        return ac.scaled_dot_product_attention(query, key, value, **rules, **options)

    def one_by_one(function):
        alone = [leaves(function(*sample)) for sample in zip(*arrays, strict=True)]
        return [torch.stack(each) for each in zip(*alone, strict=True)]

    gradients = torch.func.grad(lambda *arrays: torch.sum(attend(*arrays) ** 2), argnums=(0, 1, 2))
    for function in (attend, gradients, torch.func.jacrev(attend)):
        assert_same("torch", leaves(torch.func.vmap(function)(*arrays)), one_by_one(function))
    assert_same("torch", [compiled(torch, torch.func.vmap(attend))(*arrays)], one_by_one(attend))

    def attend_to(key, value):
        return attend(query[0], key, value, lengths[0], seeds[0])

    found = torch.func.vmap(attend_to, in_dims=(2, None), out_dims=1)(key.movedim(0, 2), value[0])
    assert_same("torch", found, torch.stack([attend_to(each, value[0]) for each in key], dim=1))


@pytest.mark.parametrize(
    ("dtype", "settings"), [("bfloat16", {"softcap": 20.0}), ("float32", {"arithmetic": "reproducible"})]
)
def test_layers_of_a_language_model_share_the_programs_that_are_compiled(torch, monkeypatch, dtype, settings):
    graphs = []
    backend = {"backend": lambda graph, inputs, **options: graphs.append(graph) or graph}
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, **backend))
    prompts = torch.tensor([[3, 14, 15, 9], [26, 5, 0, 0]])
    for num_layers in (1, 2):
        model = Decoder(50, 8, 2, 16, num_layers, num_key_value_heads=1, **settings)
        p = get_backend("torch").from_numpy(model.init(0, xp=np), dtype=dtype)
        options = {"max_new_tokens": 2, "prompt_lengths": torch.tensor([4, 2]), "temperature": 0.9}
        found, expected = (generate(model, p, prompts, mode=mode, **options) for mode in ("compiled", "eager"))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
    of_prompts, of_tokens, *of_two_layers = (len(graph.graph.nodes) for graph in graphs)
    assert of_two_layers == [of_prompts, of_tokens]


def test_a_program_computes_the_angles_of_all_layers_once(torch):
    """Inductor computes an array of few operations anew for each use of it, unless it is a part of another.

    A private function, as in the program of a layer the number of cosines also depends on what is fused.
    """
    code_of = importlib.import_module("torch._inductor.utils").run_and_get_code
    plan, xp = Rotation(1e4, 8, interleaved=False), get_backend("torch").namespace

    def rotated(query, key, positions):
        rotate = ARITHMETICS["fast"].rotation(plan, positions, query, xp=xp)
        return rotate(query) @ rotate(key).mT

    query, key = (torch.linspace(-1, 1, heads * 32).reshape(heads, 4, 8) for heads in (2, 1))
    program = torch.compile(rotated, fullgraph=True)
    _, (code,) = code_of(program, query, key, torch.arange(4, dtype=torch.int32)[:, None])
    assert code.count("cos(") == 1
