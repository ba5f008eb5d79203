"""The on-disk cache of compiled loops: one file for each loop, version of its source and signature.

numba's own cache has an index of numbered files, without a lock. Two processes that compile a loop for two signatures
at the same time use the same number, and from then on one signature runs the machine code of the other: wrong results,
or a crash, until the files are deleted. Here a file's name identifies its contents, so no coordination is needed. A
file is created atomically by renaming, and begins with a digest of the rest: damaged files are compiled again. If a
file cannot be written, that is a warning; the process continues with what it has in memory.
"""

import hashlib
import logging
import os
import pickle
import sys
import uuid
from pathlib import Path
from types import FunctionType
from typing import Any

log = logging.getLogger("onekv")

DIGEST = hashlib.sha256().digest_size


class CompiledFiles:
    """Those of one loop, in the place of numba's `IndexDataCacheFile`."""

    def __init__(self, folder: Path, function: FunctionType, stamp: object) -> None:
        """`stamp` is numba's of the source that the loop is in."""
        self._folder = folder
        self._loop = (
            f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}.{sys.implementation.cache_tag}"
        )
        self._source = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]

    def load(self, key: Any) -> Any | None:
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, data = content[:DIGEST], content[DIGEST:]
        return pickle.loads(data) if hashlib.sha256(data).digest() == digest else None

    def save(self, key: Any, compiled: Any) -> None:
        from numba.core.serialize import dumps

        data = dumps(compiled)
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        try:
            try:
                part.write_bytes(hashlib.sha256(data).digest() + data)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
            self._remove_others()
        except OSError as error:
            log.warning(
                "onekv: compiled loops cannot be cached in %s (%s): every start compiles them", self._folder, error
            )

    def flush(self) -> None:
        for path in self._folder.glob(f"{self._loop}.*.nbc"):
            path.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        import numba

        # Of what numba's key leaves out: its version, and whether indices are checked.
        full = str((numba.__version__, numba.config.BOUNDSCHECK, key))  # type: ignore[attr-defined]
        return self._folder / f"{self._loop}.{self._source}.{hashlib.sha256(full.encode()).hexdigest()[:32]}.nbc"

    def _remove_others(self) -> None:
        """Those of other versions of the source."""
        for path in self._folder.glob(f"{self._loop}.*.nbc"):
            if not path.name.startswith(f"{self._loop}.{self._source}."):
                path.unlink(missing_ok=True)
