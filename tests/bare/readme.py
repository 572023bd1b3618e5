"""Run README.md, in a folder for its files, up to the last of some installations: ``python readme.py HOW-MANY``.

Run by ``nox -s readme`` in an environment that holds what those lines of the README install, and no more.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def main(count):
    parts = PAGE.split("$ pip install ")[1 : count + 1]
    names, printed, expected = {"__name__": "__main__"}, io.StringIO(), ""
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", "".join(parts), re.DOTALL | re.MULTILINE):
        if language == "python":
            with contextlib.redirect_stdout(printed):
                exec(text, names)
        elif language == "text":
            expected += text
            assert printed.getvalue() == expected, printed.getvalue()
        elif text.startswith("$ attention-core"):
            command, *lines = text.removeprefix("$ ").splitlines()
            found = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
            assert all(line in found.stdout.splitlines() for line in lines), found
    print(f"README.md up to installation {count}: as it says")


if __name__ == "__main__":
    main(int(sys.argv[1]))
