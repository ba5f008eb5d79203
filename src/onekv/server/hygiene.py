"""Volatile text in system messages, such as timestamps: dropped or rounded before rendering.

One changed word at the beginning of a prompt makes everything after it a cache miss. A `Rule` is a pattern and its
replacement. `OWN` are those that come with OneKV; the TOML file may add others (`read_table`); `--hygiene` selects
those that are on (`chosen`). A `Hygiene` applies these to the system messages of a call, and to nothing else.

`regex` is used instead of `re` because users' patterns may take forever, on system messages of 100 KB and more. `regex`
has a timeout, after which the text is left unchanged, and lets other threads run meanwhile.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import regex

from ..config import flag, there_are
from ..errors import SettingError
from .call import ChatCall

log = logging.getLogger("onekv.server")

# How long a pattern may take for one text, in the process's CPU time.
LIMIT_S = 2.0
NONE = "none"

_CLOCK = (
    r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:\s?(?:[ap]m\b|[ap]\.m\.))?"
    r"(?:\s?(?:Z|UTC|GMT)\b)?(?:\s?[+-]\d\d:?\d\d\b)?(?:\s?\([\w ]{1,40}\))?"
)
_AFTER_DATE = rf"(?:T|,?[ ](?:at[ ])?){_CLOCK}"
_WEEKDAY = r"(?:\b(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,?[ ])?"
_MONTH = (
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|"
    r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DAY = r"\b\d{1,2}(?:st|nd|rd|th|\.)?"
_DATE = (
    rf"(?:{_WEEKDAY}(?:\b\d{{4}}[-/]\d{{1,2}}[-/]\d{{1,2}}|\b\d{{1,2}}[./-]\d{{1,2}}[./-]\d{{4}}|"
    rf"{_MONTH}[ ]{_DAY},?(?:[ ]{_CLOCK})?[ ]\d{{4}}|{_DAY}[ ](?:of[ ])?{_MONTH},?[ ]\d{{4}})(?!\d))"
)
_LABEL = (
    r"(?:\b(?:current|local|present|system|today['\u2019]?s)[ _-]?(?:date|time)|\bdate[ _-](?:and|&)[ _-]time|"
    r"\btime now|\bnow:|\btime is|\btoday is|\bit is now|\bas of|\bdatetime|\btimestamp)"
)


@dataclass(frozen=True)
class Rule:
    """`patterns` match what is replaced by `text`; ^ and $ are the ends of a line."""

    name: str
    patterns: tuple[str, ...]
    text: str = ""


OWN = {
    rule.name: rule
    for rule in (
        # Claude Code's first line of the system prompt: a version and a checksum, other ones in each conversation.
        Rule("billing", (r"^x-anthropic-billing-header:[^\n]*\n?",)),
        # A time of day that follows an ISO date, or a label such as "Current time:" in the same line.
        Rule(
            "clocks",
            (
                rf"(?i)\b\d{{4}}-\d\d-\d\d\K{_AFTER_DATE}",
                rf"(?i){_LABEL}[^\n]{{0,60}}?\K,?[ ]?(?:\bat[ ])?(?<![\d:]){_CLOCK}",
            ),
        ),
        # A date that follows such a label in the same line, with the time of day after it.
        Rule("dates", (rf"(?i){_LABEL}[^\n]{{0,60}}?\K[ ]?{_DATE}(?:{_AFTER_DATE})?",)),
    )
}
DEFAULT = "billing"


class Hygiene:
    """The rules that are on."""

    def __init__(self, rules: Iterable[Rule] = (OWN[DEFAULT],)) -> None:
        self._rules = {rule: [_compiled(rule, pattern) for pattern in rule.patterns] for rule in rules}

    @property
    def names(self) -> list[str]:
        return [rule.name for rule in self._rules]

    def clean(self, call: ChatCall) -> tuple[ChatCall, dict[str, int]]:
        """`call` with clean system messages, and how often each rule was applied. One that is empty now is left out."""
        counts: dict[str, int] = {}
        messages = []
        for message in call.messages:
            before = message.get("content")
            if message["role"] == "system" and isinstance(before, str):
                after = self._clean(before, counts)
                if after != before:
                    message = message | {"content": after}
                    if not after.strip():
                        continue
            messages.append(message)
        return (replace(call, messages=messages), counts) if counts and messages else (call, {})

    def _clean(self, text: str, counts: dict[str, int]) -> str:
        for rule, patterns in self._rules.items():
            for pattern in patterns:
                try:
                    text, count = pattern.subn(lambda _, rule=rule: rule.text, text, timeout=LIMIT_S, concurrent=True)
                except TimeoutError:
                    took = (
                        "the rule hygiene.%s took longer than %g s for a system message of %d characters; not applied"
                    )
                    log.warning(took, rule.name, LIMIT_S, len(text))
                    continue
                if count:
                    counts[rule.name] = counts.get(rule.name, 0) + count
        return text


def read_table(file: Mapping[str, Any]) -> tuple[dict[str, Rule], dict[str, Any]]:
    """The rules that a TOML file adds, and the file's settings with the names of those that are on as `hygiene`.

    As a table it has `NAME = true` or `false` for OneKV's own rules, and a table [hygiene.NAME] for each of the user's.
    """
    table = file.get("hygiene")
    if not isinstance(table, dict):
        return {}, dict(file)
    added: dict[str, Rule] = {}
    on = {DEFAULT: True}
    for name, value in table.items():
        where = f"hygiene.{name} in the TOML file"
        if name in OWN:
            if not isinstance(value, bool):
                raise SettingError(f"{where} is one of OneKV's own rules; it can only be true or false")
            on[name] = value
        elif isinstance(value, dict):
            added[name], on[name] = _rule(name, value, where), True
        else:
            raise SettingError(
                f"{where} is {value!r}; OneKV's own rules are {', '.join(OWN)}, and a rule of yours is a table with a "
                "pattern"
            )
    return added, dict(file) | {"hygiene": ",".join(name for name in on if on[name]) or NONE}


def _rule(name: str, given: Mapping[str, Any], where: str) -> Rule:
    if name == NONE or not regex.fullmatch(r"[\w-]+", name):
        raise SettingError(f"{where}: a rule's name may only have letters, digits, - and _, and cannot be {NONE!r}")
    keys = ["pattern", "replace"]
    for key, value in given.items():
        if key not in keys:
            raise SettingError(f"{where} sets {key!r}; {there_are(key, keys)}")
        if not isinstance(value, str):
            raise SettingError(f"{where}: {key} is {value!r}; it must be text")
    if "pattern" not in given:
        raise SettingError(f"{where} has no pattern; set one, such as pattern = '^Session id: .*\\n'")
    rule = Rule(name, (given["pattern"],), given.get("replace", ""))
    if _compiled(rule, given["pattern"]).search(""):
        raise SettingError(f"{where}: the pattern {given['pattern']!r} matches the empty string")
    return rule


def _compiled(rule: Rule, pattern: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(pattern, regex.MULTILINE)
    except regex.error as error:
        raise SettingError(f"hygiene.{rule.name}: the pattern {pattern!r} cannot be used: {error}") from None


def chosen(names: str, added: Mapping[str, Rule]) -> Hygiene:
    """Those of all rules that `names`, separated by commas, has; they are applied in that order."""
    rules = {**OWN, **added}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == [NONE]:
        return Hygiene(())
    for name in wanted:
        if name not in rules:
            raise SettingError(f"{flag('hygiene')} names {name!r}; {there_are(name, [*rules, NONE])}")
    return Hygiene(rules[name] for name in dict.fromkeys(wanted))
