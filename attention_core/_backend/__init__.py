"""What a library lends to the core, and how it is found. The public names are those of `attention_core.backend`."""

# ruff: noqa: F403 (each file of this room says what it has)
from attention_core._backend._autocast import *
from attention_core._backend._base import *
from attention_core._backend._collectives import *
from attention_core._backend._constants import *
from attention_core._backend._find import *
from attention_core._backend._loops import *
from attention_core._backend._registry import *
from attention_core._backend._steps import *
