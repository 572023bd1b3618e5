"""JAX as a backend: eager and jitted, on whatever devices there are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_core.backend import DIFFERENTIATED_ONCE, Array, Backend, Kernel, Operation, Tuning, explain_class
from attention_jax import namespace as jax_namespace, sharding
from attention_jax.collectives import JaxCollectives
from attention_jax.kernels import DotProduct
from attention_jax.loops import JaxLoops
from attention_numpy.adapter import Adapter
from attention_numpy.trees import (
    NumpyArray,
    known_mode,
    value_and_grad,
)

__all__ = ["JaxBackend", "backend"]

WIDE = "turn on jax_enable_x64 for types of 64 bits"
for _name in ("BCOO", "BCSR"):
    explain_class("jax", _name, ": its todense() is one", is_array=True)
explain_class("flax", "Param", ": its value is one", is_array=True)


class JaxBackend(Adapter):
    """The backend of JAX."""

    packages = ("jax", "jaxlib", "numpy", "ml_dtypes")
    hint = f": {WIDE}"
    modes: tuple[str, ...] = ("eager", "jit")
    tuning = Tuning(
        queries=2048,
        keys=512,
        min_queries=64,
        dense_below=256 * 256,
        structured_below=256 * 256,
        backward_keys=256,
        costly_most=2**20,
    )
    kernels: tuple[Kernel, ...] = (DotProduct(),)
    collectives = JaxCollectives()
    value_and_grad = value_and_grad

    def __init__(self, axes: frozenset[str] = frozenset()) -> None:
        # The loops of an operation under `jax.shard_map` vary over these axes of the mesh.
        super().__init__(jax_namespace, JaxLoops(jax_namespace, axes))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating-point types; float64 is among them once ``jax_enable_x64`` is on."""
        return ("float16", "bfloat16", "float32", *(["float64"] if jax.config.jax_enable_x64 else []))

    def owns(self, array: Array, /) -> bool:
        return isinstance(array, jax.Array)

    def is_concrete(self, array: Array, /) -> bool:
        """Whether the values can be read now: not while they are traced, not where they lie on other machines."""
        if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
            return False
        # While a function is traced, what is computed from an array that it closes over is traced as well.
        with self.without_warnings():
            return not isinstance(jnp.zeros(()), jax.core.Tracer)

    def devices(self) -> list[str]:
        """Names of the devices of this process, those of the accelerator before the CPU."""
        return list(_devices())

    def placed(self, array: NumpyArray, device: str | None, /) -> Array:
        """A copy of our own, which JAX may take over: its own copying is a program for every shape.

        Integers of 64 bits become those of 32 bits where JAX has no wider ones.

        Raises
        ------
        ValueError
            When JAX, as configured, would round the values or let them overflow.
        """
        target = None if device is None else _devices()[device]
        return jax.device_put(np.array(_narrowed(array), copy=True), target)

    def array_of(self, numbers: Sequence[float], dtype: Any, like: Array, /) -> Array:
        return jax.device_put(np.asarray(numbers, dtype=dtype))  # which is no program of its own

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        """Compile a function with XLA; Python numbers among its arguments are traced."""
        return function if known_mode(mode, self.modes) == "eager" else jax.jit(function)

    def has_gradient(self, array: Array, /) -> bool:
        """Whether a transformation that is open here differentiates; one around a program is not seen."""
        return type(array).__name__ in ("JVPTracer", "LinearizeTracer")  # of which the second has no public name

    def stop_gradient(self, array: Array, /) -> Array:
        return jax.lax.stop_gradient(array)

    def with_tangent(self, function: Callable[..., Array], tangent: Callable[..., Array], *arrays: Array) -> Array:

        @jax.custom_jvp  # type: ignore[untyped-decorator]
        def computed(*arrays: Array) -> Array:
            return function(*arrays)

        @computed.defjvp  # type: ignore[untyped-decorator]
        def differentiated(arrays: Any, tangents: Any) -> Any:
            value = computed(*arrays)
            with self.without_warnings():
                return value, tangent(arrays, jax.lax.stop_gradient(value), tangents)

        return computed(*arrays)

    def without_warnings(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which Python numbers are brought to the device, and ranks promoted, as eager calls do both."""
        config = jax.config
        is_default = config.jax_transfer_guard_host_to_device is None and config.jax_numpy_rank_promotion == "allow"
        return contextlib.nullcontext() if is_default else _lenient()

    def draw_seed(self, source: Any, /) -> Any:
        """Draw two words from a typed key of JAX or a generator of Keras; those of a raw key are words already."""
        if isinstance(source, jax.Array) and jnp.issubdtype(source.dtype, jax.dtypes.prng_key):
            return jax.random.bits(source, (2,), "uint32")
        return source.next() if type(source).__name__ == "SeedGenerator" else source

    def update_rows(self, array: Array, rows: Array, start: Array, /, *, donate: bool) -> Array:
        """Write rows into a copy, which a compiler leaves out where the array is donated or not used again."""
        return (_update_donated if donate and self.is_concrete(array) else _update_rows)(array, rows, start)

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        """Compile forward and backward, once for every plan and shape."""
        # What was the same everywhere has the sum of all gradients.
        arrays = sharding.in_one_mesh(sharding.vary(arrays, sharding.varying_axes(arrays)))
        try:
            with _width(operation):
                return sharding.run_in_automatic_axes(  # type: ignore[no-any-return]
                    _streamed, (operation, plan), arrays, lambda *arrays: operation.abstract(plan, arrays, self)
                )
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise NotImplementedError(DIFFERENTIATED_ONCE) from error

    def vjp(
        self, function: Callable[..., Array], /, *arrays: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        return jax.vjp(function, *arrays)  # type: ignore[no-any-return]


def _update_rows(array: Array, rows: Array, start: Array) -> Array:
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
    for _ in range(start.ndim):
        update = jax.vmap(update)
    return update(array, rows, start)


_update_donated = jax.jit(_update_rows, donate_argnums=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _derived(operation_and_plan: Any, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return _direction(_forward, *operation_and_plan)(arrays)  # type: ignore[no-any-return]


def _forward(operation: Operation, plan: Any, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    with _width(operation):
        axes = sharding.varying_axes(arrays)
        return operation.forward(plan, arrays, JaxBackend(axes) if axes else backend)


def _derived_forward(operation_and_plan: Any, arrays: tuple[Array, ...]) -> tuple[tuple[Array, ...], Any]:
    operation, _ = operation_and_plan
    if operation.refusal is not None:
        raise NotImplementedError(operation.refusal)
    results = _derived(operation_and_plan, arrays)
    return results, (arrays, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _derived_backward(operation_and_plan: Any, kept: Any, cotangents: tuple[Array, ...]) -> tuple[Any]:
    """The gradients, which are not differentiated again."""
    return _direction(_backward, *operation_and_plan)(kept, cotangents)  # type: ignore[no-any-return]


def _backward(operation: Operation, plan: Any, kept: Any, cotangents: tuple[Array, ...]) -> tuple[Any]:
    with _width(operation):
        axes = sharding.varying_axes(kept[0])
        gradients: Any = operation.backward(plan, *kept, cotangents, JaxBackend(axes) if axes else backend)
        return (tuple(None if gradient is None else sharding.vary(gradient, axes) for gradient in gradients),)


def _refused(*_: Any) -> Any:
    raise NotImplementedError(DIFFERENTIATED_ONCE)


_derived_backward.defvjp(lambda *arguments: (_derived_backward(*arguments), None), _refused)


def _direction(function: Callable[..., Any], operation: Operation, plan: Any) -> Callable[..., Any]:
    run = functools.partial(function, operation, plan)
    return _mapped(function, operation, plan) if operation.needs_float64 else run


@functools.lru_cache(maxsize=64)
def _mapped(function: Callable[..., Any], operation: Operation, plan: Any, *in_axes: Any) -> Callable[..., Any]:
    """A direction mapped over axes, which ``jax.vmap`` traces anew: what is traced it takes apart without float64."""
    run: Any = functools.partial(function, operation, plan)
    for axes in in_axes:
        run = jax.vmap(run, in_axes=axes)
    program = jax.custom_batching.custom_vmap(jax.jit(run))

    @program.def_vmap  # type: ignore[untyped-decorator]
    def map_again(_: int, is_mapped: Any, *arguments: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda each: 0 if each else None, tuple(is_mapped))
        with _width(operation):
            results = _mapped(function, operation, plan, *in_axes, axes)(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return program  # type: ignore[no-any-return]


@contextlib.contextmanager
def _lenient() -> Iterator[None]:
    """Whatever `jax.transfer_guard` and ``jax_numpy_rank_promotion`` say."""
    with jax.transfer_guard_host_to_device("allow"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def _width(operation: Operation) -> Iterator[None]:
    """Where float64 is to be had, whatever the configuration says; traced later than a call, ranks are promoted too."""
    wide = jax.enable_x64(True) if operation.needs_float64 else contextlib.nullcontext()
    with jax.numpy_rank_promotion("allow"), wide:
        yield


_derived.defvjp(_derived_forward, _derived_backward)
_streamed = jax.jit(_derived, static_argnums=0)  # else loops would be compiled at every call that is not jitted


def _devices() -> dict[str, Any]:
    devices = jax.local_devices()
    with contextlib.suppress(RuntimeError):  # JAX may have been told to leave the CPU alone
        devices = [*devices, *jax.local_devices(backend="cpu")]
    # JAX calls every platform of this kind "gpu", but prints a device as that of its maker: cuda:0, rocm:0.
    return {str(each) if each.platform == "gpu" else f"{each.platform}:{each.id}": each for each in devices}


def _narrowed(array: NumpyArray) -> NumpyArray:
    """Give an array the widest dtype that JAX has for it, as long as no value changes."""
    narrowed = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if narrowed.dtype != array.dtype and not np.array_equal(narrowed, array):
        raise ValueError(f"expected values that {narrowed.dtype.name} can hold; got wider {array.dtype.name}: {WIDE}")
    return narrowed


backend: Backend = JaxBackend()
