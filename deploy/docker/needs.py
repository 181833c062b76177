"""Prints the project's requirements with the given extras, one a line: a layer of their own, which a change of code leaves as it is."""

import sys
import tomllib
from pathlib import Path


def needs(project: Path, extras: list[str]) -> list[str]:
    """Of `project`, a pyproject.toml. Raises KeyError for an unknown extra."""
    described = tomllib.loads(project.read_text())["project"]
    found = list(described["dependencies"])
    for extra in extras:
        found += described["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(needs(Path("pyproject.toml"), sys.argv[1:])))
