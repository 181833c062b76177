"""`kvrelay-prefill`: a pod that computes prompts and pushes their KV."""

import sys
from collections.abc import Sequence
from typing import ClassVar, Literal

import uvloop

from kvrelay.common.logs import configure_logging
from kvrelay.common.settings import load
from kvrelay.engine.pod.server import serve_pod
from kvrelay.engine.pod.settings import PodSettings

PROG = "kvrelay-prefill"


class PrefillSettings(PodSettings):
    """A prefill pod: computes prompts, samples first tokens, pushes KV to decode pods."""

    base_port: ClassVar[int] = 9100

    role: Literal["prefill"] = "prefill"
    """Always prefill."""


def main(argv: Sequence[str] | None = None) -> None:
    settings = load(PrefillSettings, argv, PROG)
    configure_logging(PROG, settings.log_level, settings.log_format)
    sys.exit(uvloop.run(serve_pod(settings)))


if __name__ == "__main__":
    main()
