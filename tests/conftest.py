"""Fixtures that all tests share."""

from pathlib import Path

import pytest

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, fetched once into the user's cache folder."""
    from onekv.models import DEFAULT_MODEL
    from onekv.models.fetch import KNOWN_FILES, fetch

    return fetch(KNOWN_FILES[DEFAULT_MODEL], progress=False)
