"""The documentation: links lead somewhere, commands exist, examples run, tables of errors and names are complete."""

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

import onekv
from docs_pages import PAGES, ROOT, fences, run_examples
from onekv import errors
from onekv.cli import COMMANDS, _parser, main

NAV = re.findall(r'"([^"]+\.md)"', (ROOT / "zensical.toml").read_text())
# Where the Python examples of each page are run.
RUN = {
    "docs/library.md": "test_library_page.py",
    "docs/clients.md": "server/test_clients_page.py",
    "docs/events.md": "server/test_events_served.py",
    "docs/scale.md": "parallel/test_ranks.py",
    "docs/disk.md": "here",
    "docs/speculation.md": "here",
    "docs/mlx-lm.md": "here",
}


def anchors(page: str) -> set[str]:
    """Those that headings have, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation_once():
    assert sorted(NAV) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_file(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}"


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for fence in fences(page):
            if fence.language in ("", "sh", "console"):
                for line in fence.text.replace("\\\n", " ").splitlines():
                    found = re.match(r"(?:\$ |.*\| )?(onekv .*)", line)
                    # In a listing of what the program prints, commands follow a prompt.
                    if found and (fence.language != "console" or line.startswith("$ ")):
                        yield page, found[1]


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_commands_are_ones_that_the_program_knows(page, command):
    _, *words = shlex.split(command, comments=True)
    if words[0] == "mlx-server":
        # Its flags are mlx-lm's.
        assert set(COMMANDS) >= set(words[:1])
        return
    own = words.index("--") if words[0] == "launch" and "--" in words else len(words)
    with contextlib.redirect_stderr(io.StringIO()) as complaint:
        try:
            _parser(words[:own]).parse_args(words[:own])
        except SystemExit:
            pytest.fail(f"{page}: {command}\n{complaint.getvalue()}")


def test_what_plan_prints(capsys, smollm2_path):
    """But for the machine's name and what of its memory is free."""
    (shown,) = (fence for fence in fences("docs/budget.md") if fence.language == "console")
    command, _, listing = shown.text.partition("\n")
    assert main(shlex.split(command.removeprefix("$ onekv "))) == 0

    def figures(text: str) -> list[str]:
        lines = [
            line.split() for line in text.splitlines()[1:] if line.strip() and not line.startswith(("available", "-"))
        ]
        return [" ".join(words) for words in lines]

    assert figures(capsys.readouterr().out) == figures(listing)


def test_other_listings_are_what_they_say_they_are():
    for fence in (fence for page in PAGES for fence in fences(page)):
        if fence.language == "toml":
            assert tomllib.loads(fence.text), fence
        elif fence.language == "json":
            assert json.loads(fence.text), fence


def test_every_python_example_is_run_somewhere():
    assert {page for page in PAGES if any(fence.language == "python" for fence in fences(page))} == RUN.keys()
    for page, where in RUN.items():
        if where != "here":
            assert Path(page).name in (ROOT / "tests" / where).read_text(), page


@pytest.mark.parametrize("page", ["docs/disk.md", "docs/speculation.md"])
def test_examples_run(page, smollm2_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_examples(page, {}) > 0
    assert capsys.readouterr().out


def test_examples_for_mlx_lm_run(smollm2_path, tmp_path, monkeypatch):
    from onekv.mlx_lm import uninstall
    from onekv.models import load_model

    monkeypatch.chdir(tmp_path)
    loaded = load_model("smollm2-135m", join=False)
    prompt = loaded.tokenizer.encode("The capital of France is")
    names = {"model": loaded.model, "tokenizer": loaded.tokenizer, "prompt": prompt}
    try:
        assert run_examples("docs/mlx-lm.md", names) == 2
        assert names["text"] and (tmp_path / "chat.safetensors").exists()
    finally:
        uninstall()


def rows(page: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", (ROOT / page).read_text(), re.MULTILINE))


def test_every_error_is_explained():
    own = {name for name, kind in vars(errors).items() if isinstance(kind, type) and kind is not onekv.OneKVError}
    elsewhere = {"FolderInUse", "IndexUnreadable", "IntegrityError", "PoolFullError", "UnsupportedMlxLm"}
    assert rows("docs/errors.md") == own | elsewhere


def test_the_api_page_has_every_public_name():
    named = set(re.findall(r"^::: onekv\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    assert named == set(onekv.__all__) - {"__version__"}


@pytest.mark.parametrize("page", PAGES)
def test_no_list_has_run_together(page):
    """As when a paragraph is filled again that was a list: its bullets end up within lines, its indents within text."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        assert not re.search(r"[.;,] - \*\*|[a-z]   +[a-z]", line) or line.startswith("|"), f"{page}: {line}"
