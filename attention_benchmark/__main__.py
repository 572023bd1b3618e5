"""The command without the rest of attention-core's command line."""

import typer

from attention_benchmark.command import bench

if __name__ == "__main__":
    typer.run(bench)
