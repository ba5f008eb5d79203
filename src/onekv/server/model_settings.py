"""Settings of the model as clients see it: its names, its chat template, its sampling defaults."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Convert, SettingsBase, refuse, setting, switch, text, whole
from ..errors import SettingError

# Arguments of `apply_chat_template` that a template does not see, or sees as what a request says.
_OWN = {"add_generation_prompt", "chat_template", "conversation", "messages", "return_dict", "tokenize", "tools"}
_GENERATION = "the model's generation_config.json, otherwise"


def number(least: float, most: float = math.inf) -> Convert[float]:
    wanted = f"a number of at least {least:g}" if most == math.inf else f"a number from {least:g} to {most:g}"

    def convert(value: Any, where: str) -> float:
        try:
            if isinstance(value, bool):
                raise TypeError
            found = float(value)
        except (TypeError, ValueError):
            refuse(value, where, wanted)
        if not (least <= found <= most and math.isfinite(found)):
            refuse(value, where, wanted)
        return found

    return convert


def names(value: Any, where: str) -> tuple[str, ...]:
    """Separated by commas, or as a list of such texts."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        refuse(value, where, "a name, or several separated by commas")
    parts = [part.strip() for each in given for part in each.split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def json_object(value: Any, where: str) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        refuse(value, where, 'a JSON object such as {"enable_thinking": false}')
    own = sorted(_OWN & found.keys())
    if own:
        raise SettingError(f"{where} has {own[0]!r}, which the server itself passes to the template")
    return found


@dataclass(frozen=True)
class ModelSettings(SettingsBase):
    """What clients may call the model, how messages become a prompt, and how tokens are chosen."""

    alias: tuple[str, ...] = setting(
        (),
        names,
        "additional name for the model; separate several with commas, or repeat the flag",
        metavar="NAME",
        otherwise="none",
        repeats=True,
    )
    any_model: bool = switch(False, "use the served model whatever model a request names")
    chat_template: str | None = setting(
        None, text, "Jinja chat template, or a file that contains one", metavar="TEMPLATE", otherwise="the model's own"
    )
    chat_template_args: Mapping[str, Any] | None = setting(
        None,
        json_object,
        "chat template arguments for every request, as a JSON object; those in a request take precedence",
        metavar="JSON",
    )
    generation_config: bool = switch(True, "take sampling defaults from the model's generation_config.json")
    temperature: float | None = setting(
        None,
        number(0),
        "default temperature; 0 is greedy decoding",
        metavar="T",
        otherwise=f"{_GENERATION} 1",
    )
    top_p: float | None = setting(
        None,
        number(0, 1),
        "default top_p: keep the likeliest tokens up to this cumulative probability",
        metavar="P",
        otherwise=f"{_GENERATION} 1",
    )
    top_k: int | None = setting(
        None,
        whole(0),
        "default top_k: keep this many of the likeliest tokens; 0: all",
        unit="tokens",
        otherwise=f"{_GENERATION} all",
    )
    min_p: float | None = setting(
        None,
        number(0, 1),
        "default min_p: drop tokens whose probability is below this fraction of the likeliest token's",
        metavar="P",
        otherwise=f"{_GENERATION} 0",
    )
    repetition_penalty: float | None = setting(
        None,
        number(0.01, 100),
        "default repetition penalty; above 1, tokens in the prompt and the answer become less likely",
        metavar="FACTOR",
        otherwise=f"{_GENERATION} 1",
    )

    def template(self) -> str | None:
        """The text of the chat template; read when it is requested."""
        given = self.chat_template
        # Every template has a brace; few files do.
        if given is None or "{" in given:
            return given
        try:
            return Path(given).expanduser().read_text()
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it is not text"
            raise SettingError(f"cannot read the file {given!r} given as --chat-template: {reason}") from None
