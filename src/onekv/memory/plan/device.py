"""The default device and its memory."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..device import kind


@dataclass(frozen=True)
class Device:
    name: str
    # What this process may use at most, and how much of it is free now.
    total: int
    available: int


def read_device() -> Device:
    """The default device and its memory."""
    info = mx.device_info()
    name = str(info.get("device_name", mx.default_device()))
    if kind() != "cpu":
        total = int(info.get("max_recommended_working_set_size", info.get("total_memory", 0)))
        total = total or int(info["memory_size"])
        return Device(name, total, total - mx.get_active_memory())
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(name, total, total - mx.get_active_memory())
    lines = (line.split() for line in meminfo.read_text().splitlines())
    fields = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for limit, used in _cgroup_limits():
        total, available = min(total, limit), min(available, limit - used)
    return Device(name, total, available)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, use) of the control groups this process is in, where a container sets them."""
    files = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    )
    for limit, used in files:
        if Path(limit).exists() and Path(limit).read_text().strip() != "max":
            yield int(Path(limit).read_text()), int(Path(used).read_text())
