"""Free TCP ports on this host."""

import random
import socket

# Below the kernel's ephemeral range: neither an outgoing connection nor a transport that lets the kernel choose takes one
# between the look and the use.
FIRST, LAST = 20_000, 32_000


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """`count` different ports. Raises OSError when there are none."""
    found: list[int] = []
    for port in random.sample(range(FIRST, LAST), LAST - FIRST):
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports between {FIRST} and {LAST}")
