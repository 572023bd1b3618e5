"""Checks the rows of a group: ``python -m survey GROUP FOLDER [ROW...]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from survey.check import checked
from survey.rows import ROWS


def main(group: str, folder: Path, names: list[str]) -> None:
    """Check the rows of a group, one after the other; one that was told before is left, unless it is named."""
    for row in ROWS:
        path = folder / "rows" / f"{row.name}.json"
        if row.group != group or (names and row.name not in names) or (path.exists() and not names):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        print(row.name, flush=True)
        try:
            found = checked(row, folder)
        except Exception as error:  # of one row: the others go on
            print(f"  not told: {type(error).__name__}: {error}", flush=True)
            continue
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, cell in found["cells"].items():
            script = cell.get("script")
            if script:
                print(
                    f"  {name}: {script['verdict']}, {script['case']}: {script['showed']}: {script['printed']}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
