"""What a library lends to the core, and how it is found. The public names are those of `attention_core.backend`."""

# ruff: noqa: F403 (each file of this room says what it has)
from ._autocast import *
from ._base import *
from ._collectives import *
from ._constants import *
from ._find import *
from ._loops import *
from ._registry import *
from ._steps import *
