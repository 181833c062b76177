"""What a UCX endpoint goes by: `ucp_ep_query`, which UCXX does not wrap. The structures are those of <ucp/api/ucp.h>."""

import ctypes
import functools

_TRANSPORTS = 1 << 3
"""The only field that is asked for."""
_MAX_LANES = 16


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


@functools.cache
def _ucp() -> ctypes.CDLL:
    return ctypes.CDLL("libucp.so.0")  # the one that UCXX has loaded


def lanes(endpoint: int) -> tuple[str, ...]:
    """Of `UCXEndpoint.handle`, once it is connected: transports with their devices (tcp/eth0, cuda_ipc/cuda), each once, sorted.

    What carries large messages is one of them, by the memory that they lie in. Empty where UCX does not say.
    """
    entries = (_Entry * _MAX_LANES)()
    attributes = _Attributes(
        field_mask=_TRANSPORTS, entries=entries, num_entries=_MAX_LANES, entry_size=ctypes.sizeof(_Entry)
    )
    if _ucp().ucp_ep_query(ctypes.c_void_p(endpoint), ctypes.byref(attributes)) != 0:
        return ()
    found = entries[: attributes.num_entries]
    return tuple(sorted({f"{entry.transport.decode()}/{entry.device.decode()}" for entry in found}))
