"""A point where tests stop pushes."""

import asyncio


class Hold:
    def __init__(self) -> None:
        self._after_frames: int | None = None
        self._released = asyncio.Event()
        self.num_held = 0

    def hold(self, after_frames: int) -> None:
        self._after_frames = after_frames
        self._released.clear()

    def release(self) -> None:
        self._after_frames = None
        self._released.set()

    async def passes(self, num_frames: int) -> None:
        """Returns at once unless pushes are held and this one has sent `num_frames`, enough of them."""
        while self._after_frames is not None and num_frames >= self._after_frames:
            self.num_held += 1
            try:
                await self._released.wait()
            finally:
                self.num_held -= 1
