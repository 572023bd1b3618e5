"""Options of all public functions and layers: what is no boolean is refused by each, in the same words everywhere."""

import contextlib
import inspect
import math
import types

import numpy as np
import pytest
from option_helpers import calls

import attention_core as ac
import attention_models as models
from attention_core import cache, functions, initializers, layers, masks, pieces, random, scores, weights
from attention_core.backend import assumes_finite
from attention_models import layouts

MODULES = (ac, cache, functions, initializers, layers, layouts, models, masks, pieces, random, scores, weights)


def flags_of(function):
    """The options of a function that are annotated as booleans."""
    hints = {name: str(each.annotation) for name, each in inspect.signature(function).parameters.items()}
    return {name for name, hint in hints.items() if hint in ("bool", "bool | None")}


def public():
    """All public functions and classes by name, and the calls of layers."""
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, types.FunctionType) or (isinstance(thing, type) and not issubclass(thing, Exception)):
                yield name, thing
            if isinstance(thing, type) and issubclass(thing, layers.Layer):
                yield f"{name}.__call__", thing.__call__


OPTIONS = sorted({(name, flag) for name, thing in public() for flag in flags_of(thing)})
WRONG = (math.nan, object(), "yes", [], 0, 1, 1.0, np.asarray(True), np.ones(2, bool))


OPTIONAL = {"query_bias", "key_bias", "value_bias", "output_bias", "assume_finite"}  # which may be None


@pytest.mark.parametrize(("name", "flag"), OPTIONS)
def test_every_boolean_option_is_true_or_false(name, flag, put, xp):
    call = calls(put, xp)[name]
    for wrong in WRONG:
        with pytest.raises(TypeError):
            call(**{flag: wrong})
    if flag not in OPTIONAL:
        with pytest.raises(TypeError):
            call(**{flag: None})
    with pytest.raises(TypeError):
        call(**{flag: xp.asarray(True)})


def outcome(call, **flags):
    """What a call gives, or raises, as text."""
    try:
        result = call(**flags)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(result, contextlib.AbstractContextManager):
        with result:
            result = assumes_finite()
    return repr(result)


@pytest.mark.parametrize(("name", "flag"), OPTIONS)
def test_a_boolean_of_numpy_is_one_of_python(name, flag, put, xp):
    """Also where calls are remembered by what they are given."""
    call = calls(put, xp)[name]
    for value in (False,) if flag == "donate" else (True, False, True):  # what is donated is gone
        assert outcome(call, **{flag: np.bool_(value)}) == outcome(call, **{flag: value})


def test_the_options_above_are_those_that_there_are():
    names = {flag for _, flag in OPTIONS}
    assert {"is_causal", "return_weights", "return_logsumexp", "norm_first", "pool", "ragged", "interleaved"} <= names
    assert len(OPTIONS) > 25
