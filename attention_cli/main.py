"""The command ``attention-core``: starts with the core alone, and says what is missing."""

from __future__ import annotations

import importlib
import os
import sys

__all__ = ["main"]

NEEDED = ("numpy", "ml_dtypes", "typer", "rich", "junitparser", "safetensors", "tokenizers")

SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # TensorFlow is talkative
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # several libraries share an accelerator
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
"""Environment variables for this process and its children."""


def main() -> None:
    """Run the command; without the libraries of the extra ``cli``, say how to install them."""
    for name, setting in SETTINGS.items():
        os.environ.setdefault(name, setting)
    try:
        module = importlib.import_module("attention_cli.app")
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(f"attention-core: the command needs {error.name}: pip install 'attention-core[cli]'")
    module.app()
