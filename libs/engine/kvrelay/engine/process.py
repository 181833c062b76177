"""The engine process of one rank: model, blocks and transport. `python -m kvrelay.engine.process FD` speaks over the socket FD.

Two threads. The event loop owns all that decides (scheduler, blocks, tickets, the transport); the compute thread runs the model
and only that, so that KV comes and goes, and requests come and go, while a step computes.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvrelay.common.errors import Internal, KvrelayError
from kvrelay.common.logs import LogFormat, configure_logging
from kvrelay.engine import messages as m
from kvrelay.engine.channel import Channel, ChannelClosed
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.driver import Driver

log = logging.getLogger(__name__)


async def serve(sock: socket.socket) -> None:
    """From the first message to the last. Returns after Shutdown; raises ChannelClosed when the front process is gone."""
    channel: Channel[m.ToEngine] = await Channel.open(sock, msgspec.msgpack.Decoder(m.ToEngine))
    start = await channel.receive()
    if not isinstance(start, m.Start):
        raise Internal(f"the first message is a {type(start).__name__}")
    with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
        try:
            config = EngineConfig.from_wire(start.config)
            driver = await Driver.start(config, start.pod_id, channel, compute, start.kvstore)
        except Exception as error:  # noqa: BLE001 - whatever stops the start is for the front to tell
            await _refuse(channel, error)
            return
        try:
            await _until_first(driver.run(), driver.watch(), _commands(driver, channel))
        finally:
            await driver.close()


async def _refuse(channel: Channel[m.ToEngine], error: Exception) -> None:
    if isinstance(error, KvrelayError):
        log.error("cannot start: %s", error.message)
    else:
        log.exception("cannot start", exc_info=error)
        error = Internal(f"{type(error).__name__}: {error}")
    channel.send(m.Failed(call=0, code=error.code, message=error.message))
    await channel.drain()
    channel.close()


async def _commands(driver: Driver, channel: Channel[m.ToEngine]) -> None:
    while not isinstance(message := await channel.receive(), m.Shutdown):
        driver.handle(message)


async def _until_first(*coroutines: Coroutine[None, None, None]) -> None:
    """Runs all until one ends, cancels the others, and raises what that one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def main() -> None:
    told = os.environ.get
    form: LogFormat = "json" if told("KVRELAY_LOG_FORMAT") == "json" else "text"
    configure_logging("kvrelay-engine", told("KVRELAY_LOG_LEVEL", "info"), form)
    with contextlib.suppress(ChannelClosed, KeyboardInterrupt):  # the front is gone, and with it the reason to be here
        asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
