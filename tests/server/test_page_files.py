"""The page's files: sent with a strict policy, complete, unchanged where they are others', and for everybody."""

import hashlib
import re

import httpx2 as httpx
import pytest
from browser import AXE

from conftest import Server
from onekv.server.page.files import FOLDER, names

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
VENDORED = [line.split(" | ") for line in (FOLDER / "vendor/README.md").read_text().splitlines() if ".js |" in line]
VENDORED += [line.split(" | ") for line in (FOLDER / "vendor/README.md").read_text().splitlines() if ".css |" in line]


def test_browsers_get_the_page_and_others_the_line(server: Server) -> None:
    page = httpx.get(server.url, headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "text/plain" in httpx.get(server.url).headers["content-type"]
    assert httpx.get(server.url).text.startswith("OneKV is running")
    assert page.headers["vary"] == "Accept"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy and page.headers["x-content-type-options"] == "nosniff"
    # Nothing that the policy would refuse.
    assert re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page.text) is None
    again = httpx.get(server.url, headers=BROWSER | {"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_all_files_that_are_named_are_there(server: Server) -> None:
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', (FOLDER / "index.html").read_text()))
    for name in names():
        if name.endswith(".js") and not name.startswith("vendor/"):
            text = (FOLDER / name).read_text()
            named |= set(re.findall(r'from "\./([^"]+)"', text)) | set(re.findall(r'src="page/([^"]+)"', text))
            assert "innerHTML" not in text and re.search(r"https?://", text) is None
    assert len(named) > 10
    for name in named:
        # No key is needed for them.
        answer = httpx.get(f"{server.url}/page/{name}")
        assert answer.status_code == 200 and "content-security-policy" in answer.headers, name
    assert httpx.get(f"{server.url}/page/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("path", ["../files.py", "%2e%2e/files.py", "..%2f..%2fapp.py", "vendor", "", "none.js"])
def test_nothing_else_is_sent(server: Server, path: str) -> None:
    assert httpx.get(f"{server.url}/page/{path}").status_code in (401, 404)


def test_vendored_files_are_what_the_table_says() -> None:
    assert {row[0].lstrip("| ") for row in VENDORED} == {
        name.removeprefix("vendor/") for name in names() if re.fullmatch(r"vendor/.*\.(js|css)", name)
    }
    for row in VENDORED:
        content = (FOLDER / "vendor" / row[0].lstrip("| ")).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row[-1].rstrip("| ")
        assert all(f"vendor/{name}" in names() for name in re.findall(r"\((\S+\.txt)\)", row[3])), row


def test_what_tests_use_of_others_is_what_its_table_says() -> None:
    folder = AXE.parent
    (row,) = (line for line in (folder / "README.md").read_text().splitlines() if line.startswith("| axe"))
    assert row.rstrip("| ").endswith(hashlib.sha256(AXE.read_bytes()).hexdigest())
    assert all((folder / name).is_file() for name in re.findall(r"\((\S+\.txt)\)", row))
    (version,) = re.findall(r"\| (\d+\.\d+\.\d+) \|", row)
    assert AXE.read_text().startswith(f"/*! axe v{version}\n")
