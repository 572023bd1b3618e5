"""Derivatives, kernels and the parts of one library in every backend."""

import numpy as np
import pytest
from backend_helpers import Pair, assert_same_bits, floats

from attention_core.backend import get_backend

# PyTorch compiles, and differentiates forward, by parts of its own that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_backend_without_derivatives_says_so(backend):
    if backend.differentiates:
        assert callable(backend.value_and_grad(len))
        return
    with pytest.raises(TypeError):
        backend.value_and_grad(len)


def assert_gradients_by_hand(backend, value, gradients):
    """Of x * exp(y), summed, at x = (1, 2) and y = (0, 1): exp(y) and x * exp(y)."""
    pair, rest = backend.to_numpy(gradients)
    np.testing.assert_allclose(backend.to_numpy(value), 1 + 2 * np.e, rtol=1e-6)
    np.testing.assert_allclose(pair.first, [1, np.e], rtol=1e-6)
    np.testing.assert_allclose(rest["y"][0], [1, 2 * np.e], rtol=1e-6)
    np.testing.assert_array_equal(pair.second, [0.0, 0.0])  # it takes no part
    assert rest["y"][1:] == [None, None]  # integers and what is no array
    assert isinstance(pair, Pair)


@pytest.mark.needs("gradients")
def test_gradients_equal_the_derivative_by_hand(backend):
    xp = backend.namespace

    def function(pair, rest):
        return xp.sum(xp.multiply(pair.first, xp.exp(rest["y"][0])))

    rest = {"y": [floats(0.0, 1.0), np.asarray([1, 2], dtype="int32"), None]}
    arguments = backend.from_numpy((Pair(floats(1.0, 2.0), floats(5.0, 5.0)), rest))
    for mode in backend.modes:
        inside = backend.value_and_grad(backend.compile(function, mode=mode))
        outside = backend.compile(backend.value_and_grad(function), mode=mode)
        assert_gradients_by_hand(backend, *inside(*arguments))
        assert_gradients_by_hand(backend, *outside(*arguments))


@pytest.mark.needs("gradients")
def test_gradients_have_gradients(backend):
    xp = backend.namespace

    def cube(x):
        return xp.multiply(x, xp.multiply(x, x))

    def derivative(x):
        return backend.value_and_grad(cube)(x)[1][0]

    value, (gradient,) = backend.value_and_grad(derivative)(backend.from_numpy(floats(2.0).reshape(())))
    assert (float(backend.to_numpy(value)), float(backend.to_numpy(gradient))) == (12.0, 12.0)


@pytest.mark.needs("gradients")
def test_array_given_twice_has_two_gradients(backend):
    xp = backend.namespace
    x = backend.from_numpy(floats(3.0).reshape(()))
    _, gradients = backend.value_and_grad(lambda x, y: xp.multiply(x, xp.multiply(x, y)))(x, x)
    assert [float(gradient) for gradient in backend.to_numpy(gradients)] == [18.0, 9.0]


@pytest.mark.needs("gradients")
def test_function_without_variables_has_no_gradients(backend):
    xp = backend.namespace
    number = backend.from_numpy(np.asarray(3, dtype="int32"))
    value, gradients = backend.value_and_grad(lambda count, rest: xp.astype(count, xp.float32))(number, None)
    assert float(backend.to_numpy(value)) == 3.0
    assert gradients == (None, None)


@pytest.mark.needs("gradients")
def test_constant_function_has_the_gradient_zero(backend):
    xp = backend.namespace
    value, (gradient,) = backend.value_and_grad(lambda x: xp.ones(()))(backend.from_numpy(floats(1.0, 2.0)))
    assert float(backend.to_numpy(value)) == 1.0
    assert_same_bits(backend.to_numpy(gradient), floats(0.0, 0.0))


@pytest.mark.needs("gradients")
def test_function_to_several_numbers_is_refused(backend):
    with pytest.raises(ValueError):
        backend.value_and_grad(lambda x: x)(backend.from_numpy(floats(1.0, 2.0)))


@pytest.mark.needs("torch")
def test_gradients_of_torch_leave_the_inputs_alone():
    backend = get_backend("torch")
    x = backend.from_numpy(floats(1.0, 2.0)).requires_grad_()
    _, (gradient,) = backend.value_and_grad(lambda x: x.square().sum())(x)
    np.testing.assert_array_equal(backend.to_numpy(gradient), [2.0, 4.0])
    assert x.grad is None
    assert x.is_leaf
    untracked = x.detach()
    backend.value_and_grad(lambda x: x.sum())(untracked)
    backend.value_and_grad(lambda x, y: (x * y).sum())(x, untracked)
    assert not untracked.requires_grad


@pytest.mark.needs("torch")
def test_compiled_functions_of_older_torch_do_not_use_up_one_another(monkeypatch):
    backend = get_backend("torch")
    monkeypatch.setattr("attention_torch.programs.RECOMPILE_OPTIONS", {})
    for number in range(1, 10):
        doubled = backend.compile(lambda x: x + x)(backend.from_numpy(floats(number)))
        assert doubled.item() == 2 * number


@pytest.mark.needs("torch")
def test_values_of_torch_cannot_be_read_under_its_transforms():
    backend = get_backend("torch")
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = {}

    def look(where):
        def function(x):
            seen[where] = backend.is_concrete(x)
            return x.sum()

        return function

    x = torch.ones(2, 3)
    torch.vmap(look("vmap"))(x)
    torch.func.grad(lambda x: torch.vmap(look("grad of vmap"))(x).sum())(x)
    torch.vmap(torch.func.grad(look("vmap of grad")))(x)
    torch.jit.trace(look("trace"), (x,), check_trace=False)
    make_fx(look("make_fx"))(x)
    look("meta")(x.to("meta"))
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        look("fake")(mode.from_tensor(x))
    module = torch.nn.Module()
    module.forward = look("export")
    torch.export.export(module, (x,), strict=False)
    assert [where for where, concrete in seen.items() if concrete] == []
    torch.func.grad(look("grad"))(x)
    torch.func.jvp(look("jvp"), (x,), (x,))
    look("parameter")(torch.nn.Parameter(x))
    assert [where for where, concrete in seen.items() if concrete] == ["grad", "jvp", "parameter"]


@pytest.mark.needs("jax")
def test_values_of_jax_cannot_be_read_under_its_transforms():
    backend = get_backend("jax")
    import jax

    seen = {}

    def look(where):
        def function(x):
            seen[where] = (backend.owns(x), backend.is_concrete(x))
            return x.sum()

        return function

    x = jax.numpy.ones((2, 3))
    jax.vmap(look("vmap"))(x)
    jax.grad(look("grad"))(x)
    jax.eval_shape(look("eval_shape"), x)
    jax.lax.map(look("map"), x)
    jax.jit(lambda: look("closure")(x))()
    assert set(seen.values()) == {(True, False)}


@pytest.mark.needs("jax")
def test_jax_without_64_bits_says_what_to_turn_on():
    import jax

    turn_on = "turn on jax_enable_x64 for types of 64 bits"
    floating = "expected a floating-point type out of float16, bfloat16, float32; got float64"
    integers = "expected values that int32 can hold; got wider int64"
    backend, wide = get_backend("jax"), ((np.ones(1), None), (np.ones(1, "float32"), "float64"), ([2**40], None))
    with jax.enable_x64(False):
        assert backend.dtypes == ("float16", "bfloat16", "float32")
        assert backend.to_numpy(backend.from_numpy(np.asarray([-7, 2**30]))).tolist() == [-7, 2**30]
        for (array, dtype), wrong in zip(wide, (floating, floating, integers), strict=True):
            with pytest.raises(ValueError, match=f"{wrong}: {turn_on}"):
                backend.from_numpy(np.asarray(array), dtype=dtype)


@pytest.mark.needs("jax")
def test_namespace_of_jax_corrects_and_completes_it():
    xp = get_backend("jax").namespace
    import jax

    assert float(xp.erfc(xp.asarray(0.5))) == pytest.approx(0.479500122186953)
    x = jax.numpy.ones((2, 2))
    for product in (xp.matmul, xp.vecdot):
        assert "precision=(HIGHEST, HIGHEST)" in str(jax.make_jaxpr(product)(x, x)).replace("Precision.", "")


@pytest.mark.needs("gradients")
def test_what_is_constant_is_not_differentiated_by(backend):
    x = backend.from_numpy(np.asarray(3.0, "float32"))
    value, (gradient,) = backend.value_and_grad(lambda x: x * backend.stop_gradient(x))(x)
    assert float(backend.to_numpy(value)) == 9.0
    assert float(backend.to_numpy(gradient)) == 3.0
