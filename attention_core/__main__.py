"""The command, as ``python -m attention_core``."""

import importlib

if __name__ == "__main__":
    importlib.import_module("attention_cli.main").main()
