"""PyTorch as a backend: eager and compiled, on whatever accelerator there is."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import array_api_compat.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from attention_core.backend import (
    DIFFERENTIATED_ONCE,
    Array,
    Autocast,
    Kernel,
    Loops,
    Operation,
    Tuning,
    explain_class,
    remember,
)
from attention_numpy.adapter import Adapter
from attention_numpy.threads import Threads
from attention_numpy.trees import (
    NumpyArray,
    bfloat16,
    check_numpy,
    known_mode,
    map_arrays,
    to_copies,
    value_and_grad,
)
from attention_torch import operators
from attention_torch.collectives import TorchCollectives
from attention_torch.kernels import ScaledDotProduct
from attention_torch.kernels.flex import FlexAttention
from attention_torch.modes import check_local, has_modes
from attention_torch.programs import GUARD_OPTIONS, compiled_apart
from attention_torch.steps import as_step

__all__ = ["TorchBackend", "backend"]

# A tensor of torch.nn.attention.bias, whose memory was never written.
LOWER_RIGHT = ": pass mask=Causal() for its upper left variant, and mask=Causal(offset=N - M) for its lower right one"
explain_class("torch", "CausalBias", LOWER_RIGHT, is_array=True)
explain_class("torch", "MaskedTensor", ": its get_data() is one, and its get_mask() may be a mask", is_array=True)
explain_class("torch", "BlockMask", ": MaskFunction(mask_mod) is the mask of its function", is_array=False)
LOCAL_MAP = "local_map of torch.distributed.tensor.experimental calls a function with the shards"
explain_class("torch", "DTensor", f": {LOCAL_MAP}, as the guide to sharding shows", is_array=False)
explain_class("torch", "Proxy", " of torch.fx: torch.export traces attention", is_array=False)

AUTOCAST = ("cpu", "cuda")  # devices that have it
KEPT_ARRAYS = 64  # of numbers, on accelerators


class TorchThreads(Threads):
    """Of PyTorch's functions, each thread sets how many they have; what it sets is also what new threads begin with."""

    least_work = 2**24  # from which on a loop gains as much by them as their first milliseconds cost
    takes_part = False  # so that the number of new threads can be put back at once, by one that keeps its own

    def __init__(self) -> None:
        super().__init__()
        self._set, self._put_back = threading.Semaphore(0), threading.Semaphore(0)

    def count(self) -> int:
        """How many threads a function has; 1 where something sees what this thread calls, and no other."""
        is_seen = has_modes() or torch._C._len_torch_function_stack() > 0 or torch.compiler.is_compiling()
        return 1 if is_seen else torch.get_num_threads()

    def inherited(self, call: Callable[[], None]) -> Callable[[], None]:
        """The call under this thread's modes of autograd, where functions have one thread."""
        records, infers, again = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), super().inherited(call)

        def run() -> None:
            torch.get_num_threads()  # begins with the number of new threads, which later calls would do
            torch.set_num_threads(1)
            self._set.release()
            self._put_back.acquire()
            with torch.inference_mode(infers), torch.set_grad_enabled(records):
                again()

        return run

    def begin(self, count: int) -> None:
        """Wait until these have set theirs, and put back the number of new threads."""
        for _ in range(count):
            self._set.acquire()
        torch.set_num_threads(torch.get_num_threads())
        self._put_back.release(count)


LOG2_E = 1 / math.log(2)


class TorchLoops(Loops):
    """Loops that write over tensors, and take powers of 2, which PyTorch computes up to three times as fast as of e."""

    takes_out = True
    threads = TorchThreads()

    def exp_difference(self, x: Array, y: Array) -> Array:
        return x.sub_(y).mul_(LOG2_E).exp2_()

    def norm(self, x: Array) -> Array:
        return torch.linalg.vector_norm(x, dim=-1)


FLEX = FlexAttention()


def _has_autocast(device: str) -> bool:
    return device in AUTOCAST or torch.amp.is_autocast_available(device)  # which older compilers do not trace


class TorchAutocast(Autocast):
    """`torch.autocast`."""

    is_on = staticmethod(torch._C._is_any_autocast_enabled)

    def dtype(self, array: Array, /) -> torch.dtype | None:
        device = array.device.type
        if _has_autocast(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return None

    def on(self, array: Array, dtype: str, /) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(array.device.type, getattr(torch, dtype))  # type: ignore[no-any-return]

    def off(self, array: Array, /) -> contextlib.AbstractContextManager[Any]:
        device = array.device.type
        return torch.autocast(device, enabled=False) if _has_autocast(device) else contextlib.nullcontext()


class TorchBackend(Adapter):
    """The backend of PyTorch."""

    packages = ("torch", "numpy", "ml_dtypes")
    modes: tuple[str, ...] = ("eager", "compiled")
    tuning = Tuning(queries=2048, keys=512, min_queries=64, dense_below=256 * 256, structured_below=256 * 256)
    kernels: tuple[Kernel, ...] = (ScaledDotProduct(FLEX), FLEX)
    silu = staticmethod(torch.nn.functional.silu)
    collectives = TorchCollectives()
    autocast = TorchAutocast()
    as_step = staticmethod(as_step)
    value_and_grad = value_and_grad  # which touches no ``.grad``

    def __init__(self) -> None:
        super().__init__(array_api_compat.torch, TorchLoops(array_api_compat.torch))
        self._numbers: dict[Any, torch.Tensor] = {}

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float16", "bfloat16", "float32", "float64")

    def owns(self, array: Array, /) -> bool:
        return isinstance(array, torch.Tensor)

    def is_concrete(self, array: Array, /) -> bool:
        """Whether the values can be read now.

        They cannot while a compiler, an export or a CUDA graph records, under ``torch.vmap``, or where there are none.
        """
        if torch.compiler.is_compiling() or torch._C._is_tracing() or get_proxy_mode() is not None:
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(array):  # one layer for each transform around us
            if torch._C._functorch.is_batchedtensor(array):
                return False
            array = torch._C._functorch.get_unwrapped(array)
        if isinstance(array, FakeTensor) or array.is_meta:
            return False
        return not (array.is_cuda and torch.cuda.is_current_stream_capturing())

    def devices(self) -> list[str]:
        """Names of the devices; the last is ``"meta"``, whose tensors have a shape and a dtype but no values."""
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        accelerators = (torch.device(torch.accelerator.current_accelerator().type, index) for index in range(count))
        return ["cpu", *map(str, accelerators), "meta"]

    def placed(self, array: NumpyArray, device: str | None, /) -> Array:
        # Neither library knows the other's bfloat16, but both can look at the bits as integers.
        is_bfloat16 = array.dtype.name == "bfloat16"
        tensor = torch.from_numpy(to_copies(array).view("int16") if is_bfloat16 else to_copies(array))
        return (tensor.view(torch.bfloat16) if is_bfloat16 else tensor).to(device or "cpu")

    def to_numpy(self, tree: Any, /) -> Any:
        check_numpy()
        return to_copies(map_arrays(_numpy, tree))

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        """Compile a function as one graph for each combination of shapes."""
        if known_mode(mode, self.modes) == "eager":
            return function
        return compiled_apart(function, dynamic=False, options=dict(GUARD_OPTIONS) or None)  # PyTorch takes it apart

    def has_gradient(self, array: Array, /) -> bool:
        """Whether autograd records what is computed from a tensor; parameters alone are marked in any case."""
        return torch.is_grad_enabled() and bool(array.view_as(array).requires_grad)

    def stop_gradient(self, array: Array, /) -> Array:
        return array.detach()

    def draw_seed(self, source: Any, /) -> Any:
        """Draw two words from a generator of PyTorch, on its device, or of Keras."""
        if isinstance(source, torch.Generator):
            return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=source, device=source.device)
        return source.next() if type(source).__name__ == "SeedGenerator" else source

    def update_rows(self, array: Array, rows: Array, start: Array, /, *, donate: bool) -> Array:
        """Write rows into the tensor, or into a copy, without waiting for a device that holds the start.

        What was expanded, such as a prompt for several beams, shares its memory, and is copied even if it is donated.
        """
        donate = donate and (torch.compiler.is_compiling() or 0 not in array.stride())
        index = start.long().unsqueeze(-1)
        if rows.shape[-2] > 1:
            index = index + torch.arange(rows.shape[-2], device=start.device)
        if start.dim() == 0:
            return array.index_copy_(-2, index, rows) if donate else array.index_copy(-2, index, rows)
        sequences, new = (x.reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (array, rows))
        places = (
            torch.arange(len(sequences), device=start.device).unsqueeze(-1),
            index.reshape(len(sequences), rows.shape[-2]),
        )
        written = sequences.index_put_(places, new) if donate else sequences.index_put(places, new)
        return written.transpose(1, 2).reshape(array.shape)

    def array_of(self, numbers: Sequence[float], dtype: torch.dtype, like: Array, /) -> Array:
        """Return an array of numbers, which an accelerator keeps: a CUDA graph holds no copy from the host."""
        if like.is_cpu or get_proxy_mode() is not None or isinstance(like, FakeTensor):
            return torch.asarray(numbers, dtype=dtype, device=like.device)
        key = tuple(numbers), dtype, like.device
        kept = self._numbers.pop(key, None)
        if kept is None:
            with torch.inference_mode(False):
                kept = torch.asarray(numbers, dtype=dtype).to(like.device, non_blocking=True)
        remember(self._numbers, key, kept, most=KEPT_ARRAYS)
        return kept

    def affine(self, x: Array, weight: Array, bias: Array, /) -> Array:
        return torch.nn.functional.linear(x, weight.mT, bias)

    def normalize(self, x: Array, scale: Array, offset: Array, epsilon: float, /) -> Array:
        return torch.nn.functional.layer_norm(x, scale.shape, scale, offset, epsilon)

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        if torch.compiler.is_compiling() or get_proxy_mode() is not None:
            text = operators.encode(*operation, type(plan), *plan)
            # What torch.func.grad is asked about says that it is differentiated only once something is done with it.
            if torch.compiler.is_dynamo_compiling():
                arrays = tuple(array.view_as(array) for array in arrays)
            recorded = torch.is_grad_enabled() and any(array.requires_grad for array in arrays)
            results = CompiledOperationFunction.apply(text, *arrays) if recorded else operators.attend(arrays, text)
            return tuple(results)
        check_local(*arrays)
        return OperationFunction.apply((operation, plan), *arrays)  # type: ignore[no-any-return]

    def vjp(
        self, function: Callable[..., Array], /, *arrays: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        """By transforming the function where it is being transformed already, else by recording it.

        The compiler traces only the former, and compiled functions can be called only in the latter.
        """
        if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, arrays)):
            return torch.func.vjp(function, *arrays)  # type: ignore[no-any-return]
        # The history of an array is kept, so that gradients can be differentiated again.
        again = torch.is_grad_enabled() and any(array.requires_grad for array in arrays)
        with torch.enable_grad(), _recording():
            variables = [_fresh(array) if again else _fresh(array.detach()) for array in arrays]
            value = function(*variables)

        def gradients_of(cotangent: Array) -> tuple[Array, ...]:
            if not value.requires_grad:  # it depends on none of them
                return tuple(map(torch.zeros_like, variables))
            with _recording():
                return torch.autograd.grad(  # type: ignore[no-any-return]
                    value, variables, cotangent, create_graph=again, allow_unused=True, materialize_grads=True
                )

        return (value if again else value.detach()), gradients_of


def _recording() -> contextlib.AbstractContextManager[Any]:
    """Let autograd record inside an operator of ours too, where PyTorch has turned it off."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)  # type: ignore[no-any-return]


class CompiledOperationFunction(torch.autograd.Function):  # type: ignore[misc]
    """An operation with a gradient of its own, for compilers: by operators that they do not look into."""

    @staticmethod
    def forward(text: Any, *arrays: Any) -> Any:
        return tuple(operators.attend(arrays, text))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operation, *arrays = inputs
        ctx.save_for_backward(*arrays, *output)
        ctx.count = len(arrays)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        arrays, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        gradients = iter(operators.attend_backward(arrays, [*results, *cotangents], ctx.operation))
        return None, *(next(gradients) if array.is_floating_point() else None for array in arrays)


class OperationFunction(CompiledOperationFunction):
    """The same where nothing is compiled: of an `Operation` and its plan."""

    @staticmethod
    def forward(operation_and_plan: Any, *arrays: Any) -> Any:
        operation, plan = operation_and_plan
        return operation.forward(plan, arrays, backend)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(DIFFERENTIATED_ONCE)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, *OperationBackward.apply(ctx.operation, ctx.count, *ctx.saved_tensors, *cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return operators.one_by_one(OperationFunction.apply, info, in_dims, *arguments)


class OperationBackward(torch.autograd.Function):  # type: ignore[misc]
    """The gradients of `OperationFunction`, which depend on its arrays, but are not differentiated again."""

    @staticmethod
    def forward(operation_and_plan: Any, count: int, *tensors: Any) -> Any:
        """Compute the gradients of the arrays, from these, the results and as many cotangents."""
        operation, plan = operation_and_plan
        middle = (count + len(tensors)) // 2
        with backend.autocast.off(tensors[0]):  # it may be on again where one goes backward
            return operation.backward(plan, tensors[:count], tensors[count:middle], tensors[middle:], backend)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Compute the gradients of each sample, or of each cotangent of a Jacobian."""
        return operators.one_by_one(OperationBackward.apply, info, in_dims, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError(DIFFERENTIATED_ONCE)


for _each in (OperationFunction, OperationBackward):  # which PyTorch would ask for in every call
    _forward: Any = _each.forward
    _forward.__signature__ = inspect.signature(_forward)


def _numpy(tensor: torch.Tensor) -> NumpyArray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy(force=True).view(bfloat16())  # type: ignore[no-any-return]
    return tensor.numpy(force=True)  # type: ignore[no-any-return]


def _fresh(variable: torch.Tensor) -> torch.Tensor:
    """Give the same values as another tensor, to be differentiated by itself."""
    return variable.view_as(variable) if variable.requires_grad else variable.detach().requires_grad_()


backend = TorchBackend()
