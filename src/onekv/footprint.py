"""The physical memory of this process, as the system counts it.

MLX counts its own buffers. The system counts everything that is unavailable to other processes: on macOS the physical
footprint, which Activity Monitor shows and memory pressure is based on (including compressed pages and the GPU's); on
Linux the resident set, which includes pages of mapped files, but not GPU memory.
"""

import ctypes
import os
import struct
import sys
from pathlib import Path

# `struct rusage_info_v0` of <sys/resource.h>: a UUID, then ten figures, of which the eighth is ri_phys_footprint.
_RUSAGE_INFO_V0, _RUSAGE = 0, struct.Struct("=16s10Q")
_PHYS_FOOTPRINT = 8


def footprint() -> int:
    """In bytes."""
    if sys.platform == "darwin":
        buffer = ctypes.create_string_buffer(_RUSAGE.size)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, buffer) != 0:
            raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
        return of_rusage(buffer.raw)
    return of_statm(Path("/proc/self/statm").read_text(), os.sysconf("SC_PAGE_SIZE"))


def of_rusage(info: bytes) -> int:
    """The footprint in what `proc_pid_rusage` has written."""
    return int(_RUSAGE.unpack(info)[_PHYS_FOOTPRINT])


def of_statm(text: str, page_size: int) -> int:
    """The resident set in Linux' statm: its second figure, in pages."""
    return int(text.split()[1]) * page_size
