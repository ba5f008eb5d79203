"""System text that changes although nothing has: which of it is dropped or rounded, and what that saves."""

import logging
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from test_metrics import scrape

from onekv.cli import main
from onekv.config import read_file
from onekv.errors import SettingError
from onekv.server import hygiene
from onekv.server.call import ChatCall
from onekv.server.hygiene import OWN, Hygiene, chosen, read_table

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.{0}; cc_entrypoint=cli; cch={0}f3a;\n"
LONG = "You are a careful assistant who answers in one short sentence and never makes anything up. " * 12


def cleaned(text: str, rules: Hygiene) -> tuple[str, dict[str, int]]:
    said = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    call, counts = rules.clean(ChatCall(said))
    assert call.messages[-1]["content"] == text, "only system text is changed"
    return (call.messages[0]["content"] if len(call.messages) == 2 else ""), counts


def file_of(folder: Path, text: str) -> tuple[dict[str, hygiene.Rule], dict[str, Any]]:
    path = folder / "onekv.toml"
    path.write_text(text)
    return read_table(read_file(str(path), ["hygiene", "port"]))


def test_the_billing_line_is_dropped_wherever_it_is() -> None:
    rules = Hygiene()
    assert rules.names == ["billing"]
    assert cleaned(HEADER.format(1) + "Be brief.", rules) == ("Be brief.", {"billing": 1})
    assert cleaned("Be brief.\n" + HEADER.format(2) + "Be kind.", rules) == ("Be brief.\nBe kind.", {"billing": 1})
    assert cleaned(HEADER.format(3).strip(), rules) == ("", {"billing": 1})
    quoted = "Never send x-anthropic-billing-header: to others. Current time: 18:49."
    assert cleaned(quoted, rules) == (quoted, {})


def test_a_call_whose_only_message_would_be_empty_stays_as_it_is() -> None:
    call = ChatCall([{"role": "system", "content": HEADER}])
    assert Hygiene().clean(call) == (call, {})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Today's date: 2026-11-16\nBe brief.", "Today's date:\nBe brief."),
        ("Today's date: Mon Nov 16 2026", "Today's date:"),
        ("<current_date>2026-11-16</current_date>", "<current_date></current_date>"),
        ("Today is Monday, November 16th, 2026. Be brief.", "Today is. Be brief."),
        ("It is now Mon Nov 16 18:49:48 2026", "It is now"),
        ("Current time: 2026-11-16T18:49:48.123Z", "Current time:"),
        ("The current date is 16. November 2026, be brief", "The current date is, be brief"),
        ("As of 11/16/2026 at 6:49 PM, all is well", "As of, all is well"),
        # What does not change stays.
        ("Released on 2026-11-16. Version 1.2.2026", "Released on 2026-11-16. Version 1.2.2026"),
        ("Your knowledge ends in June 2025.", "Your knowledge ends in June 2025."),
        ("The current date is unknown.\n2026-11-16: released", "The current date is unknown.\n2026-11-16: released"),
    ],
)
def test_dates_are_removed_if_that_is_wanted(text: str, left: str) -> None:
    assert cleaned(text, chosen("dates", {})) == (left, {"dates": 1} if left != text else {})
    # In whatever order they are.
    both = {cleaned(text, chosen(names, {}))[0] for names in ("dates,clocks", "clocks,dates")}
    assert both == {left}


@pytest.mark.parametrize(
    ("text", "rounded"),
    [
        ("Current time: 2026-11-16T18:49:48.123Z", "Current time: 2026-11-16"),
        ("Started 2026-11-16T18:49:48+02:00, on Linux", "Started 2026-11-16, on Linux"),
        ("Log of 2026-11-16 18:49 UTC.", "Log of 2026-11-16."),
        ("Today's date is Monday, November 16, 2026 at 6:49 PM.", "Today's date is Monday, November 16, 2026."),
        ("It is now Mon Nov 16 18:49:48 2026", "It is now Mon Nov 16 2026"),
        (
            "current_date: Mon Nov 16 2026 18:49:48 GMT+0000 (Coordinated Universal Time)",
            "current_date: Mon Nov 16 2026",
        ),
        ("Local time: 16/11/2026, 18:49\nNext", "Local time: 16/11/2026\nNext"),
        ("Current time: 18:49:48", "Current time:"),
    ],
)
def test_clocks_are_cut_off_to_the_day(text: str, rounded: str) -> None:
    assert cleaned(text, Hygiene([OWN["clocks"]])) == (rounded, {"clocks": 1})


@pytest.mark.parametrize(
    "text", ["Today's date is 2026-11-16.", "Read John 3:16 at 10:30.", "Version 2026-11-16", "a:b"]
)
def test_what_is_no_clock_stays(text: str) -> None:
    assert cleaned(text, Hygiene([OWN["clocks"]])) == (text, {})


def test_a_file_switches_rules_and_adds_some(tmp_path: Path) -> None:
    added, file = file_of(
        tmp_path,
        """
        port = 1
        [hygiene]
        billing = false
        clocks = true
        [hygiene.session]
        pattern = '^Session id: .*\\n'
        [hygiene.build]
        pattern = 'build-[0-9a-f]+'
        replace = 'build-\\1'
        """,
    )
    assert file == {"port": 1, "hygiene": "clocks,session,build"}
    rules = chosen(file["hygiene"], added)
    assert cleaned("Session id: 7\nbuild-12, build-34\n", rules) == (
        "build-\\1, build-\\1\n",
        {"session": 1, "build": 2},
    )
    # The flag says which of all there are.
    assert chosen("build, billing", added).names == ["build", "billing"]
    assert chosen("none", added).names == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hygiene.x]\npattern='(a'", r"hygiene.x: the pattern '\(a' cannot be used: missing \) at position 2"),
        ("[hygiene.x]\npattern='a*'", r"hygiene.x in the TOML file: the pattern 'a\*' matches the empty string"),
        ("[hygiene.x]\nreplace='a'", "hygiene.x in the TOML file has no pattern; set one"),
        ("[hygiene.x]\npattern=5", "hygiene.x in the TOML file: pattern is 5; it must be text"),
        ("[hygiene.x]\npatern='a'", r"hygiene.x in the TOML file sets 'patern'; .* did you mean pattern\?"),
        ("[hygiene]\nx=true", "hygiene.x in the TOML file is True; OneKV's own rules are billing, clocks"),
        ("[hygiene.billing]\npattern='a'", "hygiene.billing in the TOML file is one of OneKV's own rules"),
        ("[hygiene.'a,b']\npattern='a'", "hygiene.a,b in the TOML file: a rule's name may only have letters"),
        ("[hygiene.none]\npattern='a'", "a rule's name .* cannot be 'none'"),
    ],
)
def test_a_bad_rule_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        file_of(tmp_path, text)


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(SettingError, match=r"--hygiene names 'clock'; available: .*; did you mean clocks\?"):
        chosen("billing,clock", {})


def test_the_command_refuses_a_bad_rule_before_it_loads_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "onekv.toml"
    file.write_text("[hygiene.session]\npattern = 'Session .*'\n")
    for flags, message in (
        (
            ["--hygiene", "clock"],
            "--hygiene names 'clock'; available: billing, clocks, dates, none; did you mean clocks?",
        ),
        (["--config", str(file), "--hygiene", "sesion"], "did you mean session?"),
    ):
        assert main(["serve", *flags]) == 1
        assert message in capsys.readouterr().err


def test_a_slow_pattern_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hygiene, "LIMIT_S", 0.05)
    rules = Hygiene([hygiene.Rule("slow", (r"(.*,){14}P",)), OWN["billing"]])
    text = ",".join(map(str, range(200)))
    with caplog.at_level(logging.WARNING):
        assert cleaned(HEADER + text, rules) == (text, {"billing": 1})
    assert "hygiene.slow took longer than 0.05 s for a system message of" in caplog.text
    assert text not in caplog.text


def test_another_billing_line_costs_nothing(server: Any) -> None:
    """As Claude Code sends it: the first block of `system`, another one for each conversation."""
    client = anthropic.Anthropic(base_url=server.url, api_key=server.keys[0], max_retries=0)
    httpx.delete(f"{server.url}/admin/cache", headers={"x-api-key": server.keys[0]}, timeout=60).raise_for_status()
    before = scrape(server)["onekv_hygiene_applied_total{rule=billing}"]

    def usage(number: int) -> anthropic.types.Usage:
        return client.messages.create(
            model="claude-any",
            max_tokens=2,
            system=[{"type": "text", "text": HEADER.format(number).strip()}, {"type": "text", "text": LONG}],
            messages=[{"role": "user", "content": "Hello"}],
        ).usage

    first, second = usage(11111), usage(22222)
    prompt = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert (first.cache_read_input_tokens, second.cache_read_input_tokens) == (0, prompt - 1)
    assert scrape(server)["onekv_hygiene_applied_total{rule=billing}"] == before + 2
