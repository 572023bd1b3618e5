"""What a library lends to the core, and how it is found. The public names are those of `attention_core.backend`."""

# ruff: noqa: F403 (each file of this room says what it has)
from ._base import *
from ._calls import *
from ._find import *
from ._loops import *
