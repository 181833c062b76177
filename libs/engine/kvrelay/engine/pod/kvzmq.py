"""KV events on ZeroMQ as vLLM publishes them, so that whoever listens to vLLM, llm-d's router above all, can listen to a pod.

    PUB       [topic, sequence, payload]     sequence: 8 bytes, big endian; payload: see `vllmevents`
    ROUTER    asked with [empty, first sequence], answers [empty, sequence, payload] for each batch from there that it still has,
              and [empty, -1, empty] at the end

Sequence 0 says that all blocks are cleared: what an earlier life of the pod has told is void. The others are the batches' own.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Any, Final

import zmq
import zmq.asyncio

from kvrelay.common.errors import Internal
from kvrelay.common.kvevents import AllBlocksCleared, EventBatch
from kvrelay.common.tasks import end_task
from kvrelay.engine.messages import EngineInfo
from kvrelay.engine.pod.vllmevents import Form, encode

log = logging.getLogger(__name__)

REPLAY_BATCHES: Final = 10_000
REPLAY_BYTES: Final = 64 << 20
"""What is kept for who asks again, at most."""
QUEUED_BATCHES: Final = 10_000
"""For one slow subscriber; beyond it he misses some, and sees that by their numbers."""
MAX_REQUEST_BYTES: Final = 1024
BREATH_BATCHES: Final = 64
"""Of a replay, between two of which the event loop does other things."""
END: Final = (-1).to_bytes(8, "big", signed=True)


class ZmqPublisher:
    """An endpoint with `*` in it is listened on, any other one is connected to; the replay's is always listened on."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        form: Form = "map",
        topic: str | None = None,
        replay_batches: int = REPLAY_BATCHES,
    ) -> None:
        """`topic` None: `kv@POD@MODEL`, by which llm-d tells pods apart."""
        self.num_dropped = 0
        """Each batch is handed to ZeroMQ; whom it reaches only the subscribers know."""
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        """Both, once started: with the port that was chosen."""
        self._form = form
        self._topic = topic
        self._topic_bytes = b""
        self._replay_batches = replay_batches
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.asyncio.Context()
        self._pub: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._task: asyncio.Task[None] | None = None

    def start(self, info: EngineInfo) -> None:
        topic = f"kv@{info.pod_id}@{info.model}" if self._topic is None else self._topic
        self._topic_bytes = topic.encode()
        try:
            self._pub.set_hwm(QUEUED_BATCHES)
            if "*" in self.endpoint:
                self.endpoint = _bind(self._pub, self.endpoint)
            else:
                self._pub.connect(self.endpoint)
            if self.replay_endpoint is not None:
                self._replay.maxmsgsize = MAX_REQUEST_BYTES
                self._replay.sndhwm = self._replay_batches + 1  # else the rest of a replay is dropped without a word
                self.replay_endpoint = _bind(self._replay, self.replay_endpoint)
                self._task = asyncio.create_task(self._serve(self._replay), name="kv-events-replay")
        except zmq.ZMQError as error:
            raise Internal(f"KV events cannot be published by ZMQ on {self.endpoint}: {error}") from error
        cleared = (AllBlocksCleared(),)
        self.publish(EventBatch(epoch=info.epoch, sequence=0, time=time.time(), events=cleared))

    def publish(self, batch: EventBatch) -> None:
        payload = encode(batch, self._form)
        self._keep(batch.sequence, payload)
        self._pub.send_multipart((self._topic_bytes, batch.sequence.to_bytes(8, "big"), payload), zmq.DONTWAIT)

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._replay_batches or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    async def stop(self) -> None:
        if self._task is not None:
            await end_task(self._task)
        self._pub.close(linger=0)
        self._context.destroy(linger=0)

    async def _serve(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("a request for KV events that cannot be read: %d frames", len(frames))
                continue
            asker, _, first = frames
            number = int.from_bytes(first, "big")
            kept = [entry for entry in self._kept if entry[0] >= number]
            for place, (sequence, payload) in enumerate(kept):
                await replay.send_multipart((asker, b"", sequence.to_bytes(8, "big"), payload))
                if place % BREATH_BATCHES == 0:
                    await asyncio.sleep(0)
            await replay.send_multipart((asker, b"", END, b""))


def _bind(socket: "zmq.Socket[Any]", endpoint: str) -> str:
    socket.bind(endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
