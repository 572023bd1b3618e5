"""The command as ``python -m attention_cli``."""

from attention_cli.main import main

if __name__ == "__main__":
    main()
