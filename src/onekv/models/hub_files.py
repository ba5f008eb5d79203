"""Downloads large files of models from the hub, resuming interrupted downloads.

The hub's library starts a file from the beginning if it was interrupted, and the weights of a model are often a single
file. It also downloads in threads, which Ctrl-C does not stop. So large files are downloaded here, to the place where
the library keeps them (`blobs/SHA256` in its cache, under its lock). The library does the rest: it downloads small
files first, which make the model visible, links the large ones afterwards, and reports why the hub rejects a request.
"""

import hashlib
from pathlib import Path
from typing import Any

import filelock
import requests
from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url, snapshot_download
from huggingface_hub.errors import DryRunError, HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS
from tqdm.auto import tqdm

from .download import download

# The library writes what has come in chunks of the first size; beyond the second the hub wants another protocol.
_LARGE, _TOO_LARGE = 10_000_000, 50_000_000_000
_SHA256 = 64


class _Hidden(tqdm):  # type: ignore[type-arg]
    """For a call that downloads nothing."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options | {"disable": True})


def fetch_large_files(name: str, progress: bool = True) -> None:
    """Those of the hub's model `name` that its cache lacks, and small ones. Nothing if the hub does not list them.

    Raises requests.RequestException if a connection is lost for good, and OSError if a file cannot be written; what has
    come is kept.
    """
    try:
        files = snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True, tqdm_class=_Hidden)
        large = [file for file in files if file.will_download and _LARGE <= (file.file_size or 0) <= _TOO_LARGE]
        urls = {file.filename: hf_hub_url(name, file.filename, revision=file.commit_hash) for file in large}
        found = {file: get_hf_file_metadata(url) for file, url in urls.items()}
        if found:
            snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, ignore_patterns=list(found))
    except (DryRunError, HfHubHTTPError):
        # The library meets it again, and says what it is, or makes do with what is there.
        return
    for file, about in found.items():
        if about.etag is not None and len(about.etag) == _SHA256 and about.size is not None:
            _fetch(name, file, urls[file], about.etag, about.size, progress)


def _fetch(name: str, file: str, url: str, sha256: str, size: int, progress: bool) -> None:
    cache, repo = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=name, repo_type="model")
    lock, blob = cache / ".locks" / repo / f"{sha256}.lock", cache / repo / "blobs" / sha256
    for folder in (lock.parent, blob.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock), requests.Session() as session:
        if blob.exists():
            return
        if (token := get_token()) is not None:
            session.headers["Authorization"] = f"Bearer {token}"
        part = blob.with_name(f"{sha256}.incomplete")
        try:
            download(session, url, part, size=size, title=file, progress=progress)
        except requests.HTTPError:
            return
        with part.open("rb") as whole:
            sound = hashlib.file_digest(whole, "sha256").hexdigest() == sha256
        # What is not sound is begun anew, by the library.
        part.replace(blob) if sound else part.unlink()
