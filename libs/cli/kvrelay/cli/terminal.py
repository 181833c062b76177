"""Where the command prints: as wide as the terminal; into a pipe or a file, lines stay whole."""

import sys

from rich.console import Console

PIPE_COLUMNS = 200


def terminal(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, soft_wrap=True, width=None if stream.isatty() else PIPE_COLUMNS)
