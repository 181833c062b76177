"""Reads lines `MODULE ARGUMENTS` from standard input and has each module parse its arguments, without doing anything else."""

import argparse
import importlib
import importlib.util
import shlex
import sys

import tests.interpreter  # noqa: F401 - where there is no GPU, kernels are imported for the interpreter


class Parsed(Exception):
    """Raised in place of the module's work."""


def _parse(self: argparse.ArgumentParser, *given: object) -> None:
    namespace, unknown = self.parse_known_args(*given)  # type: ignore[call-overload]
    if unknown:
        self.error(f"unknown: {unknown}")
    raise Parsed(namespace)


def main() -> None:
    argparse.ArgumentParser.parse_args = _parse  # type: ignore[method-assign]
    for line in sys.stdin:
        name, *arguments = shlex.split(line)
        package = importlib.util.find_spec(name)
        assert package is not None, f"there is no module {name}"
        module = importlib.import_module(f"{name}.__main__" if package.submodule_search_locations else name)
        sys.argv = [name, *arguments]
        if not hasattr(module, "argparse"):
            assert not arguments, f"{name} takes no arguments"
            continue
        try:
            module.main()
        except Parsed:
            continue
        raise AssertionError(f"{name} has parsed nothing")


if __name__ == "__main__":
    main()
