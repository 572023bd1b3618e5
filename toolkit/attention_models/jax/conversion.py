"""Modules of flax.nnx and equinox into layers, and back, with their weights bit for bit."""

from __future__ import annotations

from typing import Any

import jax

from attention_jax.backend import backend
from attention_jax.layers import Layer
from attention_models.layouts import LAYOUTS, LayoutError

__all__ = ["from_module", "to_module"]

CHANGED = ("qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls", "precision")
FLAX = ("query", "key", "value", "out")
EQUINOX = ("query_proj", "key_proj", "value_proj", "output_proj")


def from_module(module: Any, /) -> Layer:
    """Make a layer of a module, with copies of its weights.

    Parameters
    ----------
    module : flax.nnx.MultiHeadAttention or equinox.nn.MultiheadAttention
        Whether it is in training is no matter of a layer here, which drops weights where it is given a key. For the
        parameters of a module of flax.linen there is `attention_models.layouts.from_flax`.

    Returns
    -------
    Layer

    Raises
    ------
    TypeError
        When the module is of another class; classes derived from these may compute something else.
    attention_models.layouts.LayoutError
        When it has a setting that cannot be carried over; the message names it.

    Examples
    --------
    >>> import equinox
    >>> theirs = equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    >>> ours, x = from_module(theirs), jax.numpy.ones((3, 8))
    >>> bool(jax.numpy.allclose(ours(x), theirs(x, x, x)))
    True
    """
    if isinstance(module, Layer):
        raise TypeError(f"expected a module; got {type(module).__name__}, which is a layer already")
    name = _name(type(module))
    settings = _flax(module) if name == "flax" else {"num_heads": module.num_heads, "dropout": module.dropout.p}
    definition, parameters = LAYOUTS[name].read(backend.to_numpy(_arrays(module, name)), **settings)
    return Layer.from_numpy(definition, parameters)


def to_module(layer: Any, kind: type[Any], /) -> Any:
    """Make a module of a layer, with copies of its weights: undoes `from_module`.

    Parameters
    ----------
    layer : Layer
    kind : type
        `flax.nnx.MultiHeadAttention`, made with ``broadcast_dropout=False``, ``decode=False`` and, until
        ``module.train()`` says otherwise, ``deterministic=True``; or `equinox.nn.MultiheadAttention`.

    Returns
    -------
    object
        Of that class.

    Raises
    ------
    TypeError
        When the class is another one.
    attention_models.layouts.LayoutError
        When the layer has a setting that the class has not; the message names it.

    Examples
    --------
    >>> import equinox
    >>> from attention_jax import MultiHeadAttention
    >>> to_module(MultiHeadAttention.init(0, 8, 2), equinox.nn.MultiheadAttention).query_proj.weight.shape
    (8, 8)
    """
    name = _name(kind)
    if not isinstance(layer, Layer):
        raise TypeError(f"expected a layer of attention_jax; got {type(layer).__name__}")
    definition, parameters = layer.definition, layer.to_numpy()[0]
    arrays = backend.from_numpy(LAYOUTS[name].write(definition, parameters))
    arguments = LAYOUTS[name].arguments(definition)
    dtype = parameters.query.weight.dtype
    if name == "equinox":
        return _filled_equinox(kind(**arguments, dtype=dtype, key=jax.random.key(0)), arrays)
    return _filled_flax(kind, arguments, dtype, arrays)


def _name(kind: type[Any]) -> str:
    """The layout of a class; flax and equinox are imported only where they are in use."""
    library = getattr(kind, "__module__", "").partition(".")[0]
    if library == "flax":
        from flax import nnx  # noqa: PLC0415 (who converts no such layer does without)

        if kind is nnx.MultiHeadAttention:
            return "flax"
    if library == "equinox":
        import equinox  # noqa: PLC0415 (who converts no such layer does without)

        if kind is equinox.nn.MultiheadAttention:
            return "equinox"
    known = ", ".join(LAYOUTS[name].module for name in ("flax", "equinox"))
    hint = (
        ": attention_models.layouts.from_flax reads its params" if ".linen." in getattr(kind, "__module__", "") else ""
    )
    raise TypeError(f"expected a module out of {known}; got {getattr(kind, '__name__', kind)}{hint}")


def _arrays(module: Any, name: str) -> dict[str, jax.Array]:
    if name == "equinox":
        linears = {projection: getattr(module, projection) for projection in EQUINOX}
        for projection, linear in linears.items():
            if not (hasattr(linear, "weight") and hasattr(linear, "bias")):
                raise LayoutError(
                    f"expected {projection} of {LAYOUTS[name].module} as Linear; got {type(linear).__name__}"
                )
        found = {
            f"{projection}.{part}": getattr(linear, part)
            for projection, linear in linears.items()
            for part in ("weight", "bias")
        }
        return {path: array for path, array in found.items() if array is not None}
    parts = [(projection, part) for projection in FLAX for part in ("kernel", "bias")]
    parts += [(projection, "scale") for projection in ("query_ln", "key_ln") if getattr(module, projection) is not None]
    variables = {f"{projection}.{part}": getattr(getattr(module, projection), part) for projection, part in parts}
    return {path: linear[...] for path, linear in variables.items() if linear is not None and linear[...] is not None}


def _flax(module: Any) -> dict[str, Any]:
    """What arrays do not tell, and nothing that cannot be carried over."""
    from flax import nnx  # noqa: PLC0415 (who converts no such layer does without)

    layout = LAYOUTS["flax"].module
    if module.attention_fn is not nnx.dot_product_attention:
        raise LayoutError(f"expected attention_fn nnx.dot_product_attention of {layout}; got {module.attention_fn}")
    for name in CHANGED:
        if getattr(module, name) is not None:
            raise LayoutError(f"expected {name} None of {layout}; got {getattr(module, name)}")
    for part in FLAX:
        if type(getattr(module, part)) is not nnx.LinearGeneral:
            raise LayoutError(
                f"expected {part} of {layout} as LinearGeneral; got {type(getattr(module, part)).__name__}"
            )
    if module.decode:
        raise LayoutError(f"expected decode False of {layout}; got {module.decode}")
    if module.dtype is not None and module.dtype != module.param_dtype:
        raise LayoutError(f"expected dtype None or {module.param_dtype} of {layout}; got {module.dtype}")
    if module.dropout_rate > 0 and module.broadcast_dropout:
        raise LayoutError(
            f"expected broadcast_dropout False of {layout} with dropout, as here each weight has its own; got True"
        )
    return {"num_heads": module.num_heads, "dropout": module.dropout_rate}


def _filled_flax(kind: type[Any], arguments: dict[str, Any], dtype: Any, arrays: dict[str, jax.Array]) -> Any:
    from flax import nnx  # noqa: PLC0415 (who converts no such layer does without)

    options = {"param_dtype": dtype, "broadcast_dropout": False, "deterministic": True, "decode": False}
    module = kind(**arguments, **options, rngs=nnx.Rngs(0))
    for path, array in arrays.items():
        name, part = path.split(".")
        getattr(getattr(module, name), part)[...] = array
    return module


def _filled_equinox(module: Any, arrays: dict[str, jax.Array]) -> Any:
    import equinox  # noqa: PLC0415 (who converts no such layer does without)

    paths = [path.split(".") for path in arrays]
    return equinox.tree_at(
        lambda tree: [getattr(getattr(tree, name), part) for name, part in paths], module, list(arrays.values())
    )
