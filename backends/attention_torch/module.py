"""A layer of `attention_core.layers` as a module of PyTorch: it holds tensors, and calls its definition."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, ClassVar, Self

import torch

from attention_core import layers
from attention_core.backend import dtype_name, is_exporting, names_keywords
from attention_core.functions import linear
from attention_core.layers import named_arrays
from attention_core.layers.adapters import Adapted, call_of, constructor, described
from attention_core.parameters import Linear
from attention_core.random import check_seed, plain_seed, seed_words
from attention_numpy.trees import ARRAYS, map_arrays
from attention_torch import operators
from attention_torch.backend import backend


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody would notice if the parts of a module were not called; a loop, as Dynamo enters generators."""
    for x in module._modules.values():
        if x is not None and (x._forward_hooks or x._forward_pre_hooks or x._backward_hooks or x._backward_pre_hooks):
            return True
        if x is not None and _has_hooks(x):
            return True
    return False


def _check_hooks(part: Tree) -> None:
    """Raise if a hook of PyTorch would change a tensor when a part is called, as a layer reads its parts first."""
    for hook in part._forward_pre_hooks.values():
        kind = type(hook)
        if kind.__module__.startswith("torch.nn.utils."):
            raise TypeError(
                f"expected tensors of {part._get_name()} that torch.nn.utils.parametrize changes; got a hook of"
                f" {kind.__module__}, {kind.__name__}, which runs too late: remove it"
            )


class Tree(torch.nn.Module):  # type: ignore[misc]
    """A named tuple of tensors, with a module for every branch, so that names have dots."""

    def __init__(self, tree: Any, hold: Callable[[torch.nn.Module, str, Any], None]) -> None:
        super().__init__()
        self.form, self.size = type(tree), len(tree)
        for name, branch in zip(_branches(tree), tree, strict=True):
            if isinstance(branch, tuple):
                self.add_module(name, Tree(branch, hold))
            else:
                hold(self, name, branch)

    def _compute(self, h: torch.Tensor, *, function: Callable[[torch.Tensor], Any] | None = None) -> Any:
        """Compute a part of a layer by the function that the layer gives it, for the sake of hooks.

        A linear map computes without one, too.
        """
        if function is not None:
            return function(h)
        if self.form is not Linear:
            raise TypeError(f"expected a call of the layer that holds {self._get_name()}; got one of the part alone")
        return linear(self.read(), h, xp=backend.namespace)

    forward: Callable[..., Any] = _compute

    def __setattr__(self, name: str, value: Any) -> None:
        part = self.__dict__.get("_modules", {}).get(name)
        if isinstance(part, Tree) and not isinstance(value, Tree):
            raise TypeError(
                f"expected {name} as {part._get_name()} of attention_torch, which the layer computes; got"
                f" {type(value).__name__}: torch.nn.utils.parametrize changes its tensors, as for LoRA"
            )
        super().__setattr__(name, value)

    def read(self) -> Any:
        """The tensors that are held now."""
        names = getattr(self.form, "_fields", None)
        if self._forward_pre_hooks:
            _check_hooks(self)
        branches = map(functools.partial(getattr, self), map(str, range(self.size)) if names is None else names)
        found = [branch.read() if isinstance(branch, Tree) else branch for branch in branches]
        return tuple(found) if names is None else self.form(*found)

    def extra_repr(self) -> str:
        """The shapes of the tensors of this branch."""
        tensors = {**self._parameters, **self._buffers}
        return ", ".join(f"{name}={tuple(each.shape)}" for name, each in tensors.items() if each is not None)

    def _get_name(self) -> str:
        return self.form.__name__


class Layer(Adapted, Tree):
    """A layer of `attention_core.layers` with its parameters.

    Parameters
    ----------
    *settings, **named
        The fields of the class of the same name in `attention_core.layers`.
    device : torch.device or str, optional
        By default that of PyTorch.
    dtype : torch.dtype, optional
        Of the parameters; by default that of PyTorch.
    seed : int, optional
        Of the first values, which are the same bits on every framework; by default the default generator gives one.

    Attributes
    ----------
    definition : attention_core.layers.Layer
        The settings, and what is computed.

    Raises
    ------
    TypeError, ValueError
        When a setting, the dtype or the seed is not one; before any parameter is made.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}  # of settings whose default differs from the definition's
    _places: ClassVar[Mapping[str, str]] = {"settings": "layer.definition", "parameters": "layer"}
    _classes: ClassVar[dict[type[layers.Layer], type[Layer]]] = {}

    def __init__(
        self,
        *settings: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: Any = None,
        **named: Any,
    ) -> None:
        by_position = [field.name for field in fields(self.kind)[: len(settings)]]
        defaults = {name: value for name, value in self.defaults.items() if name not in by_position}
        definition = self.kind(*settings, **{**defaults, **named})
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _check_dtype(dtype)
        seed = plain_seed(seed, torch.is_tensor)
        if seed is not None:
            check_seed(seed)

        def empty(initial: Any) -> torch.Tensor:
            return torch.empty(initial.dims, device=device, dtype=dtype)

        super().__init__(map_arrays(empty, definition.parameters), _hold_parameter)
        state = map_arrays(empty, definition.state)
        self.state = Tree(state, torch.nn.Module.register_buffer) if state else None
        self.definition = definition
        self.reset_parameters(seed)

    @classmethod
    def _complete(cls) -> None:
        cls.__init__ = constructor(Layer, cls.kind, defaults=cls.defaults)  # type: ignore[method-assign]
        cls.__doc__ = described(cls.kind.__doc__, Layer.__doc__, class_doc=cls.__doc__)
        cls.forward = names_keywords(call_of(cls.kind, "forward", words=Layer._call.__doc__), cls.kind.__name__)

    def reset_parameters(self, seed: Any = None) -> None:
        """Start again: with the same bits on every framework for the same seed.

        Tensors without values, as those on the device ``"meta"``, are left alone.

        Parameters
        ----------
        seed : int, optional
            By default the default generator gives one.

        Raises
        ------
        TypeError, ValueError
            When the seed is not one.
        """
        tensors = named_arrays(self.read()), named_arrays(self._state())
        if not all(backend.is_concrete(tensor) for part in tensors for tensor in part.values()):
            return
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else plain_seed(seed, torch.is_tensor)
        with torch.no_grad():
            for part, start in zip(tensors, (self.definition.init, self.definition.init_state), strict=True):
                if part:
                    first = next(iter(part.values()))
                    values = start(seed, xp=backend.namespace, dtype=dtype_name(first.dtype), device=first.device)
                    _copy(part, named_arrays(values))

    read = Tree.read

    def to_numpy(self) -> tuple[Any, Any]:
        return backend.to_numpy(self.read()), backend.to_numpy(self._state())

    @classmethod
    def from_numpy(
        cls,
        definition: layers.Layer,
        parameters: Any,
        state: Any = (),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        kind = cls._class_of(definition, parameters, state)
        if dtype is not None:
            _check_dtype(dtype)
        arrays = named_arrays(parameters) | named_arrays(state, "state")
        name = None if dtype is None else dtype_name(dtype)
        target = torch.get_default_device() if device is None else device
        layer = kind(**{field.name: getattr(definition, field.name) for field in fields(definition)}, device="meta")
        tensors = map_arrays(lambda tensor: tensor.to(target), backend.from_numpy(arrays, dtype=name))
        layer.load_state_dict(tensors, assign=True)
        return layer

    def with_settings(self, **changes: Any) -> Self:
        definition = self.definition.with_settings(**changes)
        layer = copy.deepcopy(self)
        layer.definition = definition
        return layer

    def extra_repr(self) -> str:
        """The settings that have no default, or another value."""
        settings = asdict(self.definition)
        defaults = {**{field.name: field.default for field in fields(self.definition)}, **self.defaults}
        changed = [name for name, value in settings.items() if defaults[name] is MISSING or value != defaults[name]]
        return ", ".join(f"{name}={settings[name]!r}" for name in changed)

    def _get_name(self) -> str:
        return type(self).__name__

    def _state(self) -> Any:
        return () if self.state is None else self.state.read()

    def _call(self, *arrays: Any, **options: Any) -> Any:
        """Call the definition with what is held.

        Parameters
        ----------
        seed : int, integer tensor or torch.Generator, optional
            Of the dropout in training; by default the default generator gives one.
        hook : callable, optional
            As in the function; by default the hooks of the modules of parts are called, with the input and with the
            output before dropout.
        """
        tensors = [each for each in arrays if each is not None]
        for leaf in tensors:
            if not isinstance(leaf, torch.Tensor):
                hint = " of torch.fx: torch.export traces layers" if isinstance(leaf, torch.fx.Proxy) else ""
                raise TypeError(f"expected tensors of PyTorch; got {type(leaf).__name__}{hint}")
        for name, leaf in options.items():
            if isinstance(leaf, ARRAYS):
                raise TypeError(f"expected {name} as a tensor of PyTorch; got {type(leaf).__name__}")
        # A step without a hook is not read.
        if options.get("hook", ...) is None and (not torch.compiler.is_compiling() or _has_hooks(self)):
            options["hook"] = self._compute_part
        device = tensors[0].device if tensors else torch.device("cpu")
        if "seed" in options:
            options["seed"] = self._seed(options["seed"], device) if self.training else None
        parameters = self.read()
        if self.state is not None:
            options["state"] = self._step(parameters)
        return self.definition(parameters, *arrays, **options, xp=backend.namespace)

    def _compute_part(self, name: str, function: Callable[[torch.Tensor], Any], h: torch.Tensor) -> Any:
        """Call a module with what it is to compute, so that its hooks are called."""
        return self.get_submodule(name)(h, function=function)

    def _seed(self, seed: Any, device: torch.device) -> Any:
        """The seed of a call in training, as a tensor where it is drawn, so that compilers draw it anew."""
        if self.definition.dropout == 0:
            return None
        if seed is None:
            return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)
        seed = plain_seed(backend.draw_seed(seed), torch.is_tensor)
        if isinstance(seed, int) and torch.compiler.is_compiling():  # one graph for all seeds, and not one for each
            words = seed_words(seed, xp=backend.namespace)
            return torch.cat([torch.full((1,), word, dtype=torch.int32, device=device) for word in words])
        return seed

    def _step(self, parameters: Any) -> Any:
        """The state of a call; in training, what is held is then that of the next."""
        held = self._state()
        state = map_arrays(_clone, held)  # to go backward, its values are needed even after the next step
        if self.training:
            with torch.no_grad():
                refreshed = self.definition.updated_state(parameters, state, xp=backend.namespace)
                _copy(named_arrays(held), named_arrays(refreshed))
        return state


def _branches(tree: Any) -> list[str]:
    """The names of the branches of a named tuple, or the indices of those of a tuple."""
    return list(getattr(tree, "_fields", map(str, range(len(tree)))))


def _hold_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    module.register_parameter(name, None if tensor is None else torch.nn.Parameter(tensor))


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    opaque = torch.compiler.is_compiling() and not is_exporting(tensor)
    return operators.clone_for_backward(tensor) if opaque else tensor.clone()


def _copy(to: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in to.items():
        tensor.copy_(values[name])


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in backend.dtypes:
        expected = " or ".join(f"torch.{name}" for name in backend.dtypes)
        raise TypeError(f"expected dtype {expected}; got {dtype!r}")


for _kind in (Layer, Tree):
    _kind.__module__ = "attention_torch.layers"  # by which pickles and documentation know it
