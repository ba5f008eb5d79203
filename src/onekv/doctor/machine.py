"""The machine: device, versions, memory, system limits, and whether its clock jumps."""

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from .. import __version__, loops
from ..footprint import footprint
from ..memory.device import kind
from ..memory.plan.device import read_device
from ..models.blas import ensure_fast_blas
from ..models.build import build_in_place, overwritten_build
from ..units import format_size
from .base import Case, Check, Notes, switch
from .system import read_memory, sysctl

PACKAGES = ("mlx", "mlx-lm", "transformers", "numpy", "numba", "fastapi")
# Share of memory that should be available, and open files that should be allowed.
LEAST_AVAILABLE, LEAST_FILES = 0.1, 1024
# Seconds that wall clock and monotonic clock may drift apart over a run; NTP slews by far less.
MOST_APART = 1.0


def run(case: Case, notes: Notes) -> None:
    _versions(notes)
    _memory(notes)
    _wired(notes)
    _speed(case, notes)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    notes.figure("open files", "unlimited" if soft == resource.RLIM_INFINITY else soft)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        notes.warn(f"only {soft} files may be open at once, connections included", "ulimit -n 2048")


def _versions(notes: Notes) -> None:
    device = read_device()
    notes.figure("device", f"{kind()}: {device.name}")
    notes.figure("cores", os.cpu_count() or 0)
    notes.figure("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    notes.figure("onekv", __version__)
    notes.figure("python", platform.python_version())
    for package in PACKAGES:
        try:
            notes.figure(package, version(package))
        except PackageNotFoundError:
            notes.figure(package, "not installed")
    notes.figure("mlx build", build_in_place() or "default")


def _memory(notes: Notes) -> None:
    memory, device = read_memory(), read_device()
    notes.figure("memory", memory.total, "B")
    if memory.available is not None:
        notes.figure("memory available", memory.available, "B")
        if memory.available < LEAST_AVAILABLE * memory.total:
            notes.warn(
                f"only {format_size(memory.available)} of {format_size(memory.total)} memory is available: "
                "close other programs, or expect swapping",
                switch("kv_memory", "SIZE"),
            )
    if memory.swap_used is not None:
        notes.figure("swap used", memory.swap_used, "B")
    notes.figure("memory available to MLX", device.total, "B")
    notes.figure("footprint of this process", footprint(), "B")
    notes.figure("load average", os.getloadavg()[0])


def _wired(notes: Notes) -> None:
    """Wired memory cannot be swapped out. Raised limits have been tied to kernel panics; OneKV never raises them."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        notes.figure("recommended working set", int(recommended), "B")
    # MLX only reports the limit when it is set. 0 is its default, so this never raises it.
    before = mx.set_wired_limit(0)
    if before:
        notes.warn(
            f"something in this process raised MLX's wired limit to {format_size(before)}; it was reset to 0. Wired "
            "memory cannot be swapped out, and raised limits have been tied to kernel panics",
            "remove the call to mx.set_wired_limit",
        )
    limit = sysctl("iogpu.wired_limit_mb")
    if limit is None:
        return
    notes.figure("iogpu.wired_limit_mb", int(limit), "MiB")
    if int(limit):
        notes.warn(
            f"iogpu.wired_limit_mb was raised to {limit}: the GPU may take memory that macOS needs, which has been "
            "tied to kernel panics. OneKV does not need it",
            "sudo sysctl iogpu.wired_limit_mb=0",
        )


def _speed(case: Case, notes: Notes) -> None:
    """Missing packages that cost speed, not correctness."""
    if (reason := overwritten_build()) is not None:
        notes.warn(reason)
    if kind() != "cpu":
        return
    if (reason := ensure_fast_blas()) is not None:
        notes.warn(reason, "pip install -U 'onekv[cpu]'")
    if case.settings.kernels != "off" and (reason := loops.why_not()) is not None:
        notes.warn(f"{reason}: decoding is slow, and weights take more memory", loops.INSTALL.removeprefix("run "))


CHECK = Check("machine", "device, versions, memory and system limits", run)


def run_clock(case: Case, notes: Notes) -> None:
    wall, even = case.clock.now() - case.begun[0], case.clock.monotonic() - case.begun[1]
    notes.figure("wall clock drift", wall - even, "s", MOST_APART)
    if abs(wall - even) > MOST_APART:
        notes.warn(
            f"the system clock jumped by {wall - even:+.1f} s within {even:.0f} s. The disk cache dates its blocks and "
            "its daily write budget by it, and may evict recently used blocks",
            "keep the clock steady (NTP), or " + switch("hot_only", "on"),
        )


CLOCK = Check("clock", "the system clock does not jump", run_clock)
