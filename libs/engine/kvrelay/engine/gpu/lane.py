"""Copies beside the steps."""

from types import TracebackType

import torch


class Lane:
    """A stream of its own for what is done within it, by one thread at a time. One follows the other; at its end all are done."""

    def __init__(self, device: torch.device, staging_bytes: int = 0) -> None:
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._current = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._current.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.__exit__(kind, error, trace)
        # Not the device: the steps go on. Also after an error: what is copied to or from is the caller's again.
        if self._stream is not None:
            self._stream.synchronize()
