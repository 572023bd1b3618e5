"""Wrong arguments, told from static facts before any computation, in the same words on every backend."""

# ruff: noqa: F403 (each file of this room says what it has)
from .arguments import *
from .shapes import *
from .signatures import *
