"""`kvrelay-kvstore`: a node's KV store."""

import gc
import sys
from collections.abc import Sequence

import uvloop

from kvrelay.common.logs import configure_logging
from kvrelay.common.settings import load
from kvrelay.kvstore.server import serve_store
from kvrelay.kvstore.settings import KvStoreSettings

PROG = "kvrelay-kvstore"
COLLECT_OBJECTS = 20_000
"""New ones, after which garbage is looked for: a load of many blocks has thousands under way that are none."""


def main(argv: Sequence[str] | None = None) -> None:
    settings = load(KvStoreSettings, argv, PROG)
    configure_logging(PROG, settings.log_level, settings.log_format)
    # What stands now stays: the collector need not walk over it again and again while blocks come and go.
    gc.freeze()
    gc.set_threshold(COLLECT_OBJECTS)
    sys.exit(uvloop.run(serve_store(settings)))


if __name__ == "__main__":
    main()
