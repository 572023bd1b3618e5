"""The command of attention-toolkit, as ``python -m attention_core``."""

import importlib
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("attention_cli") is None:
        print("attention-core: the command needs the toolkit: install attention-toolkit[check]", file=sys.stderr)
        sys.exit(2)
    importlib.import_module("attention_cli.main").main()
