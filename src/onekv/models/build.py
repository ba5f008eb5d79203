"""Which build of MLX is installed. Standard library only: it is used before MLX is imported.

On Linux, the wheel `mlx` has no library of its own: mlx-cpu, mlx-cuda-12 or mlx-cuda-13 provides `mlx/lib/libmlx.so`.
They all install that one file, so if there are several, MLX runs on the one that was installed last.
"""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from ..errors import InstallError

_LIBRARY = "mlx/lib/libmlx.so"
_BUILD = re.compile(r"(mlx_(?:cpu|cuda_\d+))-[^-]+\.dist-info")
COMMANDS = "pip install 'onekv[cpu]', or with an NVIDIA GPU: pip install 'onekv[cuda]'"


def require_mlx() -> None:
    """Imports MLX; raises InstallError, with the command that helps, where it has no library it can load."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        if sys.platform != "linux":
            raise
        raise InstallError(f"MLX cannot be loaded ({error}); install a build of it with: {COMMANDS}") from error


def package_parents(package: str) -> list[Path]:
    """The folders `package` is installed in. Does not import it, nor importlib.metadata (50 ms)."""
    spec = find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return [Path(location).parent for location in locations or ()]


def has_library() -> bool:
    """Whether MLX has a library of its own; a build from source may have it inside another file."""
    return any((folder / _LIBRARY).exists() for folder in package_parents("mlx"))


def build_in_place() -> str | None:
    """The distribution whose library MLX loads, as `mlx-cuda-13`; None for a build that is of none of them."""
    builds = _builds()
    if len(builds) < 2:
        return next(iter(builds), None)
    return next((name for name, record in builds.items() if _owns_library(record)), None)


def overwritten_build() -> str | None:
    """One sentence if a build for CUDA is installed, but the one for CPU has written its library over it."""
    cuda = [name for name in _builds() if "cuda" in name]
    if not cuda or build_in_place() != "mlx-cpu":
        return None
    return (
        f"mlx-cpu has been installed over {cuda[0]}, so MLX does not use the GPU; run "
        f"pip uninstall -y mlx-cpu {cuda[0]}, then pip install 'onekv[cuda]'"
    )


def _builds() -> dict[str, Path]:
    """Installed builds and their lists of files."""
    return {
        match[1].replace("_", "-"): folder / name / "RECORD"
        for folder in package_parents("mlx")
        for name in os.listdir(folder)
        if (match := _BUILD.fullmatch(name))
    }


def _owns_library(record: Path) -> bool:
    """Whether the library on disk is as long as the one that this distribution brought."""
    library = record.parents[1] / _LIBRARY
    for line in record.read_text().splitlines():
        name, _, size = line.rsplit(",", 2)
        if name == _LIBRARY:
            return library.exists() and library.stat().st_size == int(size)
    return False
