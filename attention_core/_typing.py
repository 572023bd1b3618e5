"""The two types that every signature needs.

An array is whatever the user's library says it is, and a namespace is a module of that library, so both are ``Any``:
their types live in libraries that the core does not import.
"""

from typing import Any, TypeAlias

Array: TypeAlias = Any
Namespace: TypeAlias = Any
DType: TypeAlias = Any
