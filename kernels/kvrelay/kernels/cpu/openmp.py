"""Runs compiled kernels on torch's own threads: a second pool beside it would fight with it for the cores.

torch's CPU wheels carry GNU OpenMP. A kernel is a C function of one argument, where its arguments lie as int64; a region of that
OpenMP calls it once a thread, and inside of it `thread` and `threads` say whose part of the work is whose.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from numba import cfunc, types

FASTMATH = {"nsz", "arcp", "contract", "reassoc"}
"""Sums in any order, products and sums in one. Infinities and NaNs stay what they are."""

thread = types.ExternalFunction("omp_get_thread_num", types.int32())
threads = types.ExternalFunction("omp_get_num_threads", types.int32())
barrier = types.ExternalFunction("GOMP_barrier", types.void())


class NoThreads(Exception):
    """torch does not run on a GNU OpenMP here."""


def arguments(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


class Kernel:
    def __init__(self, function: Callable[[Any], None]) -> None:
        """Compiles it, or takes it from numba's cache. Raises NoThreads."""
        self._openmp = openmp()  # names what the kernel calls, and so comes first
        signature = types.void(types.CPointer(types.int64))
        try:
            self._compiled = cfunc(signature, cache=True, error_model="numpy", fastmath=FASTMATH)(function)
        except RuntimeError:  # there is no place for a cache
            self._compiled = cfunc(signature, error_model="numpy", fastmath=FASTMATH)(function)
        self._address = self._compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def run(self, values: ctypes.Array[ctypes.c_int64], together: bool) -> None:
        """In all of torch's threads or, where that is not worth it, in this one alone."""
        if together:
            self._openmp.parallel(self._address, ctypes.addressof(values), torch.get_num_threads(), 0)
        else:
            self._call(ctypes.addressof(values))


class OpenMp:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None
        for function in (thread, threads, barrier):
            address = ctypes.cast(getattr(library, function.symbol), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(function.symbol, address)


@functools.cache
def openmp() -> OpenMp:
    """That of torch. Raises NoThreads."""
    home = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise NoThreads(f"the libraries of this process cannot be read: {error}") from error
    mapped = sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line})
    own = [path for path in mapped if path.startswith(home)]
    if not own:
        raise NoThreads("torch brought no GNU OpenMP into this process")
    return OpenMp(Path(own[0]))
