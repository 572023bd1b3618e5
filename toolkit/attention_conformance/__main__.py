"""The command as ``python -m attention_conformance``, which knows no command of its own."""

import runpy

if __name__ == "__main__":
    runpy.run_module("attention_cli", run_name="__main__", alter_sys=True)
