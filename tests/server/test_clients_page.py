"""What docs/clients.md shows runs, with the client libraries themselves and a real server."""

from typing import Any

import pytest

from docs_pages import run_examples


def test_the_examples_run_in_order(server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name, value in {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.keys[0],
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": server.keys[0],
    }.items():
        monkeypatch.setenv(name, value)
    # Ollama's library reads its address when it is imported, and knows no key: it sends this header.
    import ollama

    monkeypatch.setattr(ollama, "chat", ollama.Client(server.url, headers={"x-api-key": server.keys[0]}).chat)
    names: dict[str, Any] = {}
    assert run_examples("docs/clients.md", names) == 6
    printed = capsys.readouterr().out
    assert names["again"].usage.prompt_tokens_details.cached_tokens > 40
    assert '{"city"' in printed.replace(" ", "") and names["then"].output_text
