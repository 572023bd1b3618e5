"""Wrong arguments, told from static facts before any computation, in the same words on every backend."""

# ruff: noqa: F403 (each file of this room says what it has)
from attention_core._checks.arguments import *
from attention_core._checks.functions import *
from attention_core._checks.shapes import *
from attention_core._checks.signatures import *
