"""What the metadata of attention-toolkit takes from pyproject.toml of attention-core, one folder above."""

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class VersionOfTheCore(MetadataHookInterface):
    """Gives the toolkit the version of the core, and pins that; a source distribution holds both already."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add what is declared as dynamic."""
        core = Path(self.root).parent / "pyproject.toml"
        metadata["version"] = tomllib.loads(core.read_text(encoding="utf-8"))["project"]["version"]
        metadata["dependencies"] = [f"attention-core=={metadata['version']}"]
