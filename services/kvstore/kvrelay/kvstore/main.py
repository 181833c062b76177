"""`kvrelay-kvstore`: a node's KV store."""

import sys
from collections.abc import Sequence

import uvloop

from kvrelay.common.settings import load
from kvrelay.common.telemetry import configure_logging
from kvrelay.kvstore.server import serve_store
from kvrelay.kvstore.settings import KvStoreSettings

PROG = "kvrelay-kvstore"


def main(argv: Sequence[str] | None = None) -> None:
    settings = load(KvStoreSettings, argv, PROG)
    configure_logging(PROG, settings.log_level)
    sys.exit(uvloop.run(serve_store(settings)))


if __name__ == "__main__":
    main()
