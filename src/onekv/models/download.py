"""Downloads a file over HTTP, resuming an interrupted download."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import requests
import urllib3
from tqdm import tqdm

TIMEOUT = (10.0, 60.0)
_CHUNK = 1 << 18
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0)  # seconds, after each dropped connection

_DROPPED = (
    requests.ConnectionError,
    requests.Timeout,
    urllib3.exceptions.HTTPError,
)


def download(session: requests.Session, url: str, part: Path, *, size: int, title: str, progress: bool) -> None:
    """Makes `part` the whole of `url`, of `size` bytes, keeping the bytes it already has.

    A dropped connection is taken up again a few times. Raises requests.RequestException when that
    is not enough and OSError when `part` cannot be written; `part` then keeps what came.
    """
    with tqdm(total=size, unit="B", unit_scale=True, desc=title, file=sys.stderr, disable=not progress) as bar:
        for pause in _PAUSES:
            if _continue(session, url, part, size, bar):
                return
            time.sleep(pause)
        if not _continue(session, url, part, size, bar):
            raise requests.ConnectionError(f"{url} was dropped {len(_PAUSES) + 1} times")


def _continue(session: requests.Session, url: str, part: Path, size: int, bar: "tqdm[Any]") -> bool:
    """One connection, asked for the bytes that `part` lacks. False when it was dropped."""
    have = part.stat().st_size if part.exists() else 0
    if have == size:
        return True
    # Identity, because a range of a compressed answer would be a range of other bytes.
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    try:
        with session.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
            answer.raise_for_status()
            _save(answer, part, have, size, bar)
    except _DROPPED:
        return False
    return part.stat().st_size >= size


def _save(answer: requests.Response, part: Path, have: int, size: int, bar: "tqdm[Any]") -> None:
    """Adds the answer to `part`, or replaces it where the server did not heed the range."""
    heeded = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    goes_on = answer.status_code == requests.codes.partial_content and heeded
    bar.n = have if goes_on else 0
    with part.open("ab" if goes_on else "wb") as file:
        if answer.status_code == requests.codes.partial_content and not heeded:
            return
        # read1 gives what has come; iter_content would lose a chunk cut short by a drop.
        while chunk := answer.raw.read1(_CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
            if file.tell() > size:
                break  # Not the file that is wanted; its checksum will say so.
        file.flush()
        os.fsync(file.fileno())
