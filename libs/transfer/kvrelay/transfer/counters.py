"""What a port has moved, and what went wrong with it. Counted from the start, on the loop's thread."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """Payload is KV alone; the bytes of the calls into the transport are the transport's own counters."""

    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    payload_bytes_overlapped: int = 0
    """Of those sent: what entered the transport before the last chunk's last layer began to compute."""
    frames_sent: int = 0
    frames_received: int = 0
    frames_rejected: int = 0
    """Of open tickets: a wrong checksum, or a place where nothing is expected."""
    checksum_errors: int = 0
    messages_stray: int = 0
    """Drained: of revoked or unknown tickets, or too large."""
    transfers_completed: int = 0
    transfers_failed: int = 0
    transfers_cancelled: int = 0
    seconds: float = 0.0
    """From a push's first frame to its acknowledgement, summed over completed ones; on the receiver from its beginning."""
    links_opened: int = 0
    links_refused: int = 0
    links_lost: int = 0
    handler_errors: int = 0
    """Errors of this code or of a sink or source, each of them logged."""
