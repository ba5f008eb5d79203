"""Memory and kernel settings as the operating system reports them; sizes in bytes, None if unknown."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 5


@dataclass(frozen=True)
class Memory:
    total: int
    available: int | None
    swap_used: int | None


def read_memory() -> Memory:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return of_meminfo(meminfo.read_text())
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pages, swap = _output("vm_stat"), sysctl("vm.swapusage")
    return Memory(total, of_vm_stat(pages) if pages else None, of_swapusage(swap) if swap else None)


def of_meminfo(text: str) -> Memory:
    """Linux: kB by name."""
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return Memory(sizes["MemTotal"], sizes["MemAvailable"], sizes["SwapTotal"] - sizes["SwapFree"])


def of_vm_stat(text: str) -> int | None:
    """macOS: memory that is free or can be reclaimed without writing to disk."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"^Pages ([a-z ]+):\s+(\d+)\.", text, re.MULTILINE))
    kinds = ("free", "inactive", "speculative", "purgeable")
    return int(size[1]) * sum(int(pages.get(kind, 0)) for kind in kinds) if size else None


def of_swapusage(text: str) -> int | None:
    """macOS: `total = 2048.00M  used = 1024.50M  free = ...`."""
    used = re.search(r"used = ([\d.]+)([KMG])", text)
    return int(float(used[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[used[2]]) if used else None


def sysctl(name: str) -> str | None:
    """A kernel setting, or None if there is none of that name."""
    return _output("sysctl", "-n", name)


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
