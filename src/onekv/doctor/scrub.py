"""Removes private data from text, so that the output of `onekv doctor` can be pasted into a bug report.

The home folder becomes ~; user name, host name and secrets are masked. Secrets are the values of all environment
variables whose names suggest one, because any of them could show up in an error message.
"""

import getpass
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from ..config import Settings, variable
from ..server.model_settings import ModelSettings
from ..server.models.settings import BudgetSettings
from ..server.settings import ServerSettings

MASK = "***"
PREFIX = "ONEKV_"
# Not `_TOKENS`, which are counts.
_SECRET = re.compile(r"(^|_|API)KEYS?($|_)|TOKEN($|_)|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Shorter values may be ordinary words.
_LEAST = 6


class Scrubber:
    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._secrets = sorted(
            {
                part
                for name, value in environment.items()
                if _SECRET.search(name)
                for part in (value, *value.split(","))
                if len(part.strip()) >= _LEAST
            },
            key=len,
            reverse=True,
        )
        self._homes = sorted({str(Path.home()), environment.get("HOME", "")} - {"", "/"}, key=len, reverse=True)
        self._names = {_user(): "USER", socket.gethostname(): "HOST", socket.gethostname().partition(".")[0]: "HOST"}

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        # User and password in a URL.
        text = re.sub(r"(\w+://)[^/@\s]+@", rf"\1{MASK}@", text)
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        for name, instead in self._names.items():
            if len(name) > 2 and name != "localhost":
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
        return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A uid without a name, as in some containers.
        return ""


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The ONEKV_ variables that are set, with their values if they are known settings and not secret."""
    environment = os.environ if environment is None else environment
    settings = [*fields(Settings), *fields(ServerSettings), *fields(ModelSettings), *fields(BudgetSettings)]
    shown = {variable(each.name) for each in settings if each.repr} | {"ONEKV_CACHE_DIR"}
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIX)}
    return {name: value if name in shown and not _SECRET.search(name) else MASK for name, value in found.items()}
