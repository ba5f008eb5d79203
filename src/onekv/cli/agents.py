"""The coding agents that `onekv launch` supports: how much context each needs, and how it is pointed at the server.

An agent gets variables, arguments before its own, and files in a folder that is removed afterwards. None of the user's
files are changed, so there is nothing to restore.

To add an agent: write a function that turns a `Served` and the folder into a `Setup`, and add an entry to `AGENTS`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Served:
    """A server as an agent sees it; `longest`: tokens that a request may have, prompt and answer together."""

    url: str
    model: str
    key: str
    longest: int


@dataclass(frozen=True)
class Setup:
    # None: not set.
    variables: dict[str, str | None] = field(default_factory=dict)
    # Set unless the user has them.
    defaults: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    # In the folder, by name.
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    program: str
    # How to get it.
    install: str
    # Tokens: of its first request, as seen with SmolLM2's tokenizer, and what a conversation should have room for.
    first: int
    room: int
    setup: Callable[[Served, Path], Setup]


def _answer(served: Served) -> int:
    """Tokens of an answer: a quarter of what there is."""
    return min(8192, max(256, served.longest // 4))


def _claude(served: Served, folder: Path) -> Setup:
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
    return Setup(
        {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key,
            # With both it asks which one to use.
            "ANTHROPIC_API_KEY": None,
            **{f"ANTHROPIC_{name}": served.model for name in names},
            # No telemetry, no update; no line in the system prompt that changes with each conversation.
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        },
        {
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_answer(served)),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.longest),
            # A long prompt may take its time.
            "API_TIMEOUT_MS": "3600000",
        },
    )


def _codex(served: Served, folder: Path) -> Setup:
    provider = {
        "name": "OneKV",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": "ONEKV_LAUNCH_KEY",
        "stream_idle_timeout_ms": 3_600_000,
    }
    settings = {
        "model": served.model,
        "model_provider": "onekv",
        **{f"model_providers.onekv.{name}": value for name, value in provider.items()},
        "model_context_window": served.longest,
        # Tools that only OpenAI's servers can run.
        "web_search": "disabled",
        "features.multi_agent": False,
    }
    # JSON's texts, numbers and truth are TOML's, too.
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Setup({"ONEKV_LAUNCH_KEY": served.key}, arguments=arguments)


def _opencode(served: Served, folder: Path) -> Setup:
    model = f"onekv/{served.model}"
    config = {
        "model": model,
        "small_model": model,
        "share": "disabled",
        "autoupdate": False,
        "provider": {
            "onekv": {
                "name": "OneKV",
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": "{env:ONEKV_LAUNCH_KEY}"},
                "models": {
                    served.model: {
                        "name": served.model,
                        "tool_call": True,
                        "limit": {"context": served.longest, "output": _answer(served)},
                    }
                },
            }
        },
    }
    return Setup(
        {
            "ONEKV_LAUNCH_KEY": served.key,
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _aider(served: Served, folder: Path) -> Setup:
    model = f"openai/{served.model}"
    # Else it warns of a model that it does not know.
    known = {"litellm_provider": "openai", "mode": "chat", "input_cost_per_token": 0, "output_cost_per_token": 0}
    limits = {"max_input_tokens": served.longest, "max_output_tokens": _answer(served)}
    return Setup(
        {
            "OPENAI_API_BASE": f"{served.url}/v1",
            "OPENAI_API_KEY": served.key,
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
        },
        arguments=["--model", model, "--model-metadata-file", str(folder / "models.json")],
        files={"models.json": json.dumps({model: known | limits})},
    )


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", 20_300, 49_152, _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", 6_500, 32_768, _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", 7_700, 32_768, _opencode),
    "aider": Agent("aider", "pip install aider-chat", 700, 16_384, _aider),
}
