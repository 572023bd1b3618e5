"""Prints how the rooms of a package import each other: rooms, floors, arrows, circles, and the largest file.

``python tools/import_graph.py attention_core``. A room is a file or folder at the top of the package; a floor is the
length of the longest chain of imports below a room.
"""

import functools
import sys
from pathlib import Path

import grimp
import networkx


def main(package):
    """Print the facts of a package."""
    graph = grimp.build_graph(package)
    room = lambda module: ".".join(module.split(".")[: package.count(".") + 2])  # noqa: E731
    arrows = networkx.DiGraph()
    arrows.add_nodes_from(room(module) for module in graph.modules)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if room(module) != room(imported):
                arrows.add_edge(room(module), room(imported))
    circles = [part for part in networkx.strongly_connected_components(arrows) if len(part) > 1]

    @functools.cache
    def floor(name):
        return 1 + max((floor(below) for below in arrows.successors(name)), default=0)

    folder = Path(__import__(package.partition(".")[0]).__file__).parent.joinpath(*package.split(".")[1:])
    lines = {path.relative_to(folder): len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    largest = max(lines, key=lines.get)
    floors = "circles" if circles else max(map(floor, arrows))
    print(f"rooms {len(arrows)}, floors {floors}, arrows {arrows.number_of_edges()}, circles {circles}")
    print(f"{sum(lines.values())} lines, of which {lines[largest]} in the largest file, {largest}")
    for name in sorted(arrows, key=lambda name: () if circles else (-floor(name), name)):
        print(f"{'' if circles else floor(name):3} {name:40} -> {' '.join(sorted(arrows.successors(name)))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "attention_core")
