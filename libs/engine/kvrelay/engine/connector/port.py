"""The KV store as an engine's driver sees it: started, counted and closed as one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.common.access import PodAccess
from kvrelay.common.ids import BlockId, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.common.tasks import end_task
from kvrelay.engine.build import Built
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import KvStoreOptions
from kvrelay.engine.connector.base import Connector
from kvrelay.engine.connector.chained import ConnectorChain
from kvrelay.engine.connector.copies import Copier
from kvrelay.engine.connector.kvstore import KvStoreAccess, KvStoreConnector
from kvrelay.engine.connector.loads import Loads, OnLoaded, not_told
from kvrelay.engine.connector.stores import Stores
from kvrelay.engine.convert import storage
from kvrelay.engine.core import Engine
from kvrelay.engine.messages import KvStoreCounters
from kvrelay.transfer.block import BlockInfo, shape_of

WATCH_SECONDS = 0.25


def identity_of(built: Built, options: KvStoreOptions | None) -> BlockInfo:
    """What all spans that this pod stores have in common. Raises IncompatibleLayout for a dtype that is not converted."""
    dtype = built.cache.dtype if options is None or options.dtype == "auto" else KvDtype(options.dtype)
    storage(dtype)
    no_id = BlockId(bytes(16))
    return BlockInfo(
        id=no_id,
        head=no_id,
        fingerprint=built.loaded.fingerprint,
        shape=shape_of(built.layout, str(built.loaded.dtype)),
        dtype=dtype,
        size=built.cache.span_bytes(dtype),
    )


def make_connector(options: KvStoreOptions | None, pod_id: PodId, built: Built) -> Connector | None:
    """None: there is no store. Raises as `identity_of` does, and Internal where a certificate cannot be read."""
    if options is None:
        return None
    identity, own = identity_of(built, options), built.cache.dtype
    connectors = [
        KvStoreConnector(_access(options, address, pod_id, identity, own), pin=built.cache.pin)
        for address in options.addresses
    ]
    return connectors[0] if len(connectors) == 1 else ConnectorChain(connectors)


def _access(options: KvStoreOptions, address: str, pod_id: PodId, identity: BlockInfo, own: KvDtype) -> KvStoreAccess:
    ca, cert, key = (Path(p) if p else None for p in (options.tls_ca, options.tls_cert, options.tls_key))
    return KvStoreAccess(
        address=address,
        rpc=PodAccess.load(options.token, ca=ca, cert=cert, key=key, name=options.tls_name),
        pod_id=pod_id,
        fingerprint=identity.fingerprint,
        shape=identity.shape,
        dtype=identity.dtype,
        readable=tuple({identity.dtype, own}),
    )


class KvStorePort:
    """Loads before sequences run, and stores behind the steps, over one connector."""

    def __init__(
        self,
        engine: Engine,
        cache: KvCache,
        identity: BlockInfo,
        connector: Connector,
        on_change: Callable[[], None],
        *,
        load_always: bool = False,
        on_loaded: OnLoaded = not_told,
    ) -> None:
        """`load_always`: also what it would take less time to compute."""
        self._connector = connector
        self._cache = cache
        # One for each way: a load does not wait for what is being stored.
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("load", "store")]
        copier = Copier(cache, identity)
        self._loads = Loads(engine, connector, copier, self._threads[0], on_change, on_loaded, always=load_always)
        self._stores = Stores(engine, connector, copier, self._threads[1], on_change)
        self._on_change = on_change
        self._said = KvStoreCounters()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._connector.start()
        self._tasks = [
            asyncio.create_task(self._stores.run(), name="store"),
            asyncio.create_task(self._watch(), name="store-watch"),
        ]

    async def _watch(self) -> None:
        """What is counted here changes without a step as well."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._count() != self._said:
                self._on_change()

    async def close(self) -> None:
        await self._loads.close()
        for task in self._tasks:
            await end_task(task)
        loop = asyncio.get_running_loop()
        for thread in self._threads:
            await loop.run_in_executor(None, thread.shutdown)
        await self._connector.close()

    def counters(self) -> KvStoreCounters:
        """To be said: `_watch` sees to it that what changes after it is said as well."""
        self._said = self._count()
        return self._said

    def _count(self) -> KvStoreCounters:
        loads, stores = self._loads.counters, self._stores.counters
        return KvStoreCounters(
            attached=self._connector.ready,
            lookups=loads.lookups,
            hits=loads.hits,
            declined=loads.declined,
            loaded_tokens=loads.tokens,
            bytes_loaded=loads.num_bytes,
            load_seconds=loads.seconds,
            corrupt=loads.corrupt,
            timeouts=self._connector.num_timeouts,
            stored_tokens=stores.spans * 16,
            bytes_stored=stores.num_bytes,
            waiting_blocks=self._stores.num_waiting,
            dropped_blocks=stores.dropped,
            refused=stores.refused,
        )
