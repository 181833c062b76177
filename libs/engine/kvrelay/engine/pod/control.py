"""The Pod service: what every pod answers, whatever its role."""

import asyncio

import grpc.aio

from kvrelay.common.errors import InvalidRequest, Unsupported
from kvrelay.common.pod.state import PodState
from kvrelay.common.rpc import answering
from kvrelay.engine.api import EngineClient
from kvrelay.engine.pod import steps
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.v1 import pod_pb2, pod_pb2_grpc

STATUS_SECONDS = 1.0
"""Between two statuses while nothing changes."""
MIN_STATUS_SECONDS = 0.05
KEYS_PER_PIECE = 4096
HOLD_POINTS = ("", "prefill", "push", "decode")

InfoContext = grpc.aio.ServicerContext[pod_pb2.GetInfoRequest, pod_pb2.PodInfo]
WatchContext = grpc.aio.ServicerContext[pod_pb2.WatchRequest, pod_pb2.PodStatus]
DrainContext = grpc.aio.ServicerContext[pod_pb2.DrainRequest, pod_pb2.DrainResponse]
InspectContext = grpc.aio.ServicerContext[pod_pb2.InspectRequest, pod_pb2.InspectResponse]
CachedContext = grpc.aio.ServicerContext[pod_pb2.GetCachedBlocksRequest, pod_pb2.CachedBlocks]
HoldContext = grpc.aio.ServicerContext[pod_pb2.SetHoldRequest, pod_pb2.SetHoldResponse]


class PodServicer(pod_pb2_grpc.PodServicer):
    def __init__(
        self,
        engine: EngineClient,
        state: PodState,
        events: EventLog | None,
        *,
        role: str,
        version: str,
        test_hooks: bool,
    ) -> None:
        """`events` None: the pod does not follow its cache."""
        self._engine = engine
        self._state = state
        self._events = events
        self._role = role
        self._version = version
        self._test_hooks = test_hooks

    async def GetInfo(self, request: pod_pb2.GetInfoRequest, context: InfoContext) -> pod_pb2.PodInfo:
        info = pod_pb2.PodInfo()
        async with answering(context):
            info.CopyFrom(steps.info_to_proto(self._engine.info, self._role, self._version))
        return info

    async def Watch(self, request: pod_pb2.WatchRequest, context: WatchContext) -> None:  # type: ignore[override]
        async with answering(context):
            while not self._state.over:
                told = self._state.num_changes
                await context.write(self._status())
                await asyncio.sleep(MIN_STATUS_SECONDS)
                await self._state.changed(STATUS_SECONDS - MIN_STATUS_SECONDS, since=told)

    def _status(self) -> pod_pb2.PodStatus:
        state = self._state
        return steps.status_to_proto(self._engine.info, self._engine.stats, ready=state.ready, draining=state.draining)

    async def Drain(self, request: pod_pb2.DrainRequest, context: DrainContext) -> pod_pb2.DrainResponse:
        async with answering(context):
            self._state.ask_to_leave(request.grace_ms / 1000 if request.grace_ms else None)
        return pod_pb2.DrainResponse()

    async def Inspect(self, request: pod_pb2.InspectRequest, context: InspectContext) -> pod_pb2.InspectResponse:
        answer = pod_pb2.InspectResponse()
        async with answering(context):
            answer.CopyFrom(steps.inspection_to_proto(await self._engine.inspect()))
        return answer

    async def GetCachedBlocks(  # type: ignore[override]
        self, request: pod_pb2.GetCachedBlocksRequest, context: CachedContext
    ) -> None:
        async with answering(context):
            if self._events is None:
                raise Unsupported("the pod was started with --no-kv-events")
            snapshot = self._events.snapshot()
            for start in range(0, len(snapshot.keys) or 1, KEYS_PER_PIECE):
                keys = b"".join(snapshot.keys[start : start + KEYS_PER_PIECE])
                await context.write(pod_pb2.CachedBlocks(epoch=snapshot.epoch, sequence=snapshot.sequence, keys=keys))

    async def SetHold(self, request: pod_pb2.SetHoldRequest, context: HoldContext) -> pod_pb2.SetHoldResponse:
        async with answering(context):
            if not self._test_hooks:
                raise Unsupported("the pod was started without --test-hooks", "point")
            if request.point not in HOLD_POINTS:
                raise InvalidRequest(f"{request.point!r} is no hold point", "point")
            await self._engine.set_hold(request.point, request.after_frames)
        return pod_pb2.SetHoldResponse()
