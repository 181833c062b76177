"""Addresses: what a process listens on, and under which name others reach it."""

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

WILDCARDS = frozenset({"", "0.0.0.0", "::", "*"})


def join(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


def host_towards(url: str) -> str:
    """This machine's own address on the way to the host of `url`; loopback where there is no way. Sends nothing."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with contextlib.suppress(OSError):
        family, kind, proto, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def advertised(listen_host: str, given: str | None, towards: str) -> str:
    """The host under which others reach what listens on `listen_host`."""
    if given:
        return given
    return host_towards(towards) if listen_host in WILDCARDS else listen_host


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens; port 0 takes a free one. Raises OSError where the port is taken."""
    v6 = ":" in host and ipaddress.ip_address(host).version == 6
    family = socket.AF_INET6 if v6 else socket.AF_INET
    server = socket.create_server(("" if host == "*" else host, port), family=family, backlog=256)
    server.setblocking(False)
    return server
