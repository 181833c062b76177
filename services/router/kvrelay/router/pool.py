"""All pods that this router knows: from the directory, each kept by a task of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from kvrelay.common.access import PodAccess
from kvrelay.common.discovery import PodRecord, RetryPolicy
from kvrelay.common.errors import IncompatibleLayout, KvrelayError
from kvrelay.common.ids import Epoch, Fingerprint, PodId, RouterId
from kvrelay.common.layout import KvLayout, check_compatible
from kvrelay.router.load import Load
from kvrelay.router.pods import Pod
from kvrelay.router.policy import PodsView

log = logging.getLogger(__name__)

RECONNECT = RetryPolicy(initial_seconds=0.1, maximum_seconds=2.0)


class Directory(Protocol):
    """`kvrelay.common.discovery.PodDirectory`, as far as it is needed here."""

    def pods(self) -> dict[PodId, PodRecord]: ...
    def updates(self) -> AsyncIterator[dict[PodId, PodRecord]]: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Pods:
    """`view` is what a policy chooses from. `on_change` is called when it changed, or a load in it.

    A pod stays known while its record stands in the directory or its health stream is open: losing the directory loses no pod.
    """

    def __init__(
        self,
        directory: Directory,
        router_id: RouterId,
        access: PodAccess,
        on_change: Callable[[], None],
        *,
        tokenizer: str,
    ) -> None:
        """`tokenizer`: the digest of the router's own."""
        self.view = PodsView()
        self.fingerprints: frozenset[Fingerprint] = frozenset()
        """Of the pods in view."""
        self._directory = directory
        self._router_id = router_id
        self._access = access
        self._on_change = on_change
        self._tokenizer = tokenizer
        self._foreign: set[tuple[PodId, Epoch]] = set()
        """Pods of another model, which were told of in the log."""
        self._keepers: dict[tuple[PodId, Epoch], asyncio.Task[None]] = {}
        self._current: dict[tuple[PodId, Epoch], Pod] = {}
        """Of each keeper, the pod that it last connected to."""
        self._usable: dict[Load, Pod] = {}
        self._layouts: list[KvLayout] = []
        """One of each group of pods that can send each other KV; its index is the group's number."""
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._directory.start()
        self._follower = asyncio.create_task(self._follow(), name="pods")

    async def close(self) -> None:
        tasks = [*self._keepers.values(), *([self._follower] if self._follower is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._directory.stop()

    def __getitem__(self, load: Load) -> Pod:
        """The pod of a load in the `view` of now."""
        return self._usable[load]

    def known(self) -> list[Pod]:
        """All that are looked after, usable or not."""
        return list(self._current.values())

    def decoding(self, group: int | None = None) -> list[Pod]:
        """The usable pods that stream tokens; None: of all groups."""
        return [pod for pod in self._usable.values() if pod.streams and group in (None, pod.load.group)]

    async def _follow(self) -> None:
        async for records in self._directory.updates():
            found = {(record.pod_id, record.epoch): record for record in records.values()}
            self._foreign &= found.keys()
            for key, record in found.items():
                if record.tokenizer not in ("", self._tokenizer):
                    self._refuse(key, record)
                elif key not in self._keepers:
                    self._keepers[key] = asyncio.create_task(self._keep(record), name=f"pod {record.pod_id}")

    def _refuse(self, key: tuple[PodId, Epoch], record: PodRecord) -> None:
        """Token ids would mean other text there: answers would be nonsense, without an error."""
        if key not in self._foreign:
            self._foreign.add(key)
            log.error(
                "pod %s of the model %s is not used: its tokenizer is not this router's", record.pod_id, record.model
            )

    async def _keep(self, record: PodRecord) -> None:
        """Connects, and again whenever the pod is lost, while its record stands."""
        key = (record.pod_id, record.epoch)
        group = self._group_of(record.layout)
        failures = 0
        former: KvrelayError | None = None
        while self._directory.pods().get(record.pod_id) == record:
            pod = self._current[key] = Pod(record, group, self._router_id, self._access)
            was_usable = False

            def refresh(pod: Pod = pod) -> None:
                nonlocal was_usable
                was_usable |= pod.usable
                self._refresh(pod)

            reason = await pod.serve(self._on_change, refresh)
            failures = 1 if was_usable else failures + 1
            if failures == 1 or type(reason) is not type(former):
                log.warning("%s pod %s: %s", "lost" if was_usable else "cannot use", pod, reason)
            former = reason
            await asyncio.sleep(RECONNECT.delay(failures))
        self._current.pop(key, None)
        self._keepers.pop(key, None)

    def _group_of(self, layout: KvLayout) -> int:
        for number, known in enumerate(self._layouts):
            try:
                check_compatible(layout, known)
            except IncompatibleLayout:
                continue
            return number
        self._layouts.append(layout)
        return len(self._layouts) - 1

    def _refresh(self, pod: Pod) -> None:
        """After a pod became usable, or stopped being so."""
        if pod.usable:
            self._usable[pod.load] = pod
        else:
            self._usable.pop(pod.load, None)
        prefill: dict[int, list[Load]] = {}
        for known in self._usable.values():
            if not known.streams:
                prefill.setdefault(known.load.group, []).append(known.load)
        self.view = PodsView([known.load for known in self._usable.values() if known.streams], prefill)
        self.fingerprints = frozenset(known.record.fingerprint for known in self._usable.values())
        self._on_change()
