"""The folder for OneKV's own files, which ONEKV_CACHE_DIR moves."""

import os
import sys
from pathlib import Path

from ..errors import FetchError


def cache_dir() -> Path:
    """The cache folder, created (mode 0700) if it is not there.

    $ONEKV_CACHE_DIR if set, else the platform's place for caches. Raises FetchError naming
    ONEKV_CACHE_DIR when the folder cannot be made.
    """
    return make_folder(_location())


def make_folder(folder: Path) -> Path:
    """`folder`, created with its parents if it is not there. Raises FetchError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(
            f"the cache folder {folder} cannot be created ({error.strerror}); "
            "set ONEKV_CACHE_DIR to a folder that can be written"
        ) from error
    return folder


def _location() -> Path:
    if chosen := os.environ.get("ONEKV_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    # Not by platformdirs: on macOS it follows XDG_CACHE_HOME, too, and a folder from before would not be found again.
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "onekv"
    # The XDG specification says that a relative path there must be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else _home() / ".cache") / "onekv"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise FetchError("there is no home folder to keep a cache in; set ONEKV_CACHE_DIR to a folder") from error
