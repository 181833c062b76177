"""`kvrelay-decode`: a pod that takes KV in and streams tokens; with `--role both` it computes every prompt itself as well."""

import sys
from collections.abc import Sequence
from typing import ClassVar, Literal

import uvloop

from kvrelay.common.logs import configure_logging
from kvrelay.common.settings import load
from kvrelay.engine.pod.server import serve_pod
from kvrelay.engine.pod.settings import PodSettings

PROG = "kvrelay-decode"


class DecodeSettings(PodSettings):
    """A decode pod: admits requests, takes in their KV, runs continuous-batched decoding."""

    base_port: ClassVar[int] = 9200

    role: Literal["decode", "both"] = "decode"
    """decode, or both: prefill and decode in one pod."""


def main(argv: Sequence[str] | None = None) -> None:
    settings = load(DecodeSettings, argv, PROG)
    configure_logging(PROG, settings.log_level, settings.log_format)
    sys.exit(uvloop.run(serve_pod(settings)))


if __name__ == "__main__":
    main()
