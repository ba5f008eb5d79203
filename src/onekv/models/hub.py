"""Model folders from the Hugging Face hub, through mlx-lm's own download and its cache."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download

from ..errors import FetchError, ModelNotFoundError
from .hub_files import fetch_large_files

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """True for `org/name`, the shape of a hub id."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def cached_folder(name: str, whole: bool = False) -> Path | None:
    """The folder of the hub's model `name` in the hub's cache, if it is there, and `whole` if that is asked for."""
    if whole:
        try:
            return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def hub_folder(name: str, progress: bool = True) -> Path:
    """The folder of the hub's model `name`, downloaded if the hub's cache does not have it, and continued if that has a
    part of it. `progress` shows large files on stderr; the hub's library shows small ones.

    Raises ModelNotFoundError when there is no such model or this user may not have it, FetchError
    when the hub cannot be reached or the download fails.
    """
    try:
        if cached_folder(name, whole=True) is None:
            fetch_large_files(name, progress)
        return Path(_download(name))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated on the Hugging Face hub: accept its terms there, then run hf auth login"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{name} is neither a local folder nor a model on the Hugging Face hub (a private one needs hf auth login)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise FetchError(
            f"{name} is neither a local folder nor in the local cache, and the Hugging Face hub "
            "cannot be reached; check the network, HTTPS_PROXY and HF_HUB_OFFLINE, or give a "
            "local folder or .gguf file"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise FetchError(f"the Hugging Face hub rejected the request for {name} (HTTP {status}); try later") from error
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise FetchError(
            f"{name} could not be downloaded from the Hugging Face hub: {reason}; "
            "the next attempt resumes where this one stopped"
        ) from error
