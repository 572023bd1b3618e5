"""Caches of keys and values, for decoding."""

from ._functions.cache import KeyValueCache, append, cache_mask, empty_cache
from ._keywords import publish

__all__ = ["KeyValueCache", "append", "cache_mask", "empty_cache"]

publish(vars(), __all__)
