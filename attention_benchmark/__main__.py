"""The command by itself, where no other command of attention-core is installed."""

import typer

from attention_benchmark.command import bench

if __name__ == "__main__":
    typer.run(bench)
