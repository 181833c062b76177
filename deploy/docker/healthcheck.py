"""healthcheck.py PORT PATH: does this container's HTTP side say yes? The exit status is the answer. Imports little: it runs often."""

import socket
import sys

SECONDS = 3.0


def status(port: int, path: str) -> int:
    """Of the answer. Raises OSError where none comes in time, ValueError for one that is no HTTP."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        first = connection.makefile("rb").readline(1024)
    version, code = first.split(b" ", 2)[:2]
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"no HTTP: {first!r}")
    return int(code)


if __name__ == "__main__":
    try:
        code = status(int(sys.argv[1]), sys.argv[2])
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[2]}: {error}")
    sys.exit(0 if code == 200 else f"{sys.argv[2]}: {code}")
