"""Rotel, an OpenTelemetry collector, as a process of its own between the services and the test."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotel.agent import Agent

from kvrelay.cli.ports import free_ports
from tests.observe.collector import Collector, collecting
from tests.waiting import eventually


@contextmanager
def relaying(folder: Path) -> Iterator[Collector]:
    """`url` is Rotel's; `spans` are what it has handed on. Its log is in `folder`."""
    with collecting() as sink, (folder / "rotel.log").open("wb") as log:
        grpc, http = free_ports(2)
        options = {
            "pid-file": folder / "rotel.pid",
            "otlp-grpc-endpoint": f"127.0.0.1:{grpc}",
            "otlp-http-endpoint": f"127.0.0.1:{http}",
            "exporter": "otlp",
            "otlp-exporter-protocol": "http",
            "otlp-exporter-endpoint": sink.url,
        }
        command = [Agent.agent_path, "start", *(f"--{name}={value}" for name, value in options.items())]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ROTEL_")}
        process = subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def listens() -> bool:
            assert process.poll() is None, (folder / "rotel.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", http)) == 0

        try:
            eventually(listens, "Rotel listens")
            relay = Collector(f"http://127.0.0.1:{http}")
            relay.spans = sink.spans
            yield relay
        finally:
            process.terminate()
            process.wait(20)
