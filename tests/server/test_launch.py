"""`onekv launch`: a stand-in for an agent gets what the real one reads, makes its calls, and leaves nothing behind.

The stand-ins are small programs with the agents' names, found through the PATH, that use the real client libraries.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from several import start_several

from conftest import stop_server
from onekv.bench.soak import save_tiny
from onekv.cli import main
from onekv.cli.agents import AGENTS, Served
from terminal import Terminal

CODEX = """
import json, openai, os, sys, tomllib
given = [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "-c"]
config = tomllib.loads("\\n".join(given))
provider = config["model_providers"][config["model_provider"]]
client = openai.OpenAI(base_url=provider["base_url"], api_key=os.environ[provider["env_key"]])
for question in ("Hello", "Hello again"):
    *_, last = client.responses.create(model=config["model"], instructions="You are brief. " * 40, input=question,
                                       max_output_tokens=2, stream=True)
print(json.dumps({"cached": last.response.usage.input_tokens_details.cached_tokens, "config": config}))
sys.exit(7)
"""
AIDER = """
import json, openai, os, sys
file = sys.argv[sys.argv.index("--model-metadata-file") + 1]
model = sys.argv[sys.argv.index("--model") + 1]
client = openai.OpenAI(base_url=os.environ["OPENAI_API_BASE"])
for question in ("Hello", "Hello again"):
    said = [{"role": "system", "content": "You are brief. " * 40}, {"role": "user", "content": question}]
    answer = client.chat.completions.create(model=model.removeprefix("openai/"), max_tokens=2, messages=said)
print(json.dumps({"arguments": sys.argv[-4:], "file": file, "known": json.load(open(file))[model],
                  "cached": answer.usage.prompt_tokens_details.cached_tokens}))
sys.exit(7)
"""
PATIENT = """
import signal, sys, time
def interrupted(*_):
    print("the agent was interrupted", flush=True)
    sys.exit(5)
signal.signal(signal.SIGINT, interrupted)
print("the agent runs", flush=True)
time.sleep(600)
"""

# Models of a file, and which of them is not there.
NAMED = (("small", ""), ("other", "-other"))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a program into the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, text: str) -> None:
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def keys(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_API_KEYS", ",".join(server.keys))


def port_of(server: Any) -> str:
    return str(server.url).rpartition(":")[2]


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def launch(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "onekv", "launch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def test_an_agent_on_a_server_that_runs(server: Any, keys: None, program: Callable[[str, str], None]) -> None:
    program("aider", AIDER)
    done = launch("aider", "--port", port_of(server), "--", "-p", "two words", "--", "-x")
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    assert said["arguments"] == ["-p", "two words", "--", "-x"]
    assert said["cached"] > 100, "the second call finds what the first one left"
    assert said["known"]["max_input_tokens"] > 4096
    assert not Path(said["file"]).parent.exists()
    # Shown first, without the key.
    assert f"export OPENAI_API_BASE={server.url}/v1" in done.stderr and "export OPENAI_API_KEY=KEY" in done.stderr
    assert not any(key in done.stderr for key in server.keys)
    assert "should have room for 16,384" in done.stderr and "It may still work." in done.stderr
    assert "prompt tokens were cached (" in done.stderr.splitlines()[-1]
    assert httpx.get(f"{server.url}/health").status_code == 200, "a server that ran before goes on"


def test_a_proxy_is_not_asked_for_the_server(
    server: Any, keys: None, program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("aider", AIDER)
    # Nobody listens there.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    done = launch("aider", "--port", port_of(server), "--", "-p", "Hello")
    assert done.returncode == 7, done.stderr
    assert "export NO_PROXY=example.org,127.0.0.1\n" in done.stderr


def test_a_server_of_its_own_is_started_and_stopped(
    program: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    program("codex", CODEX)
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path / "cache"))
    port = free_port()
    flags = ("--model", str(smollm2_path), "--port", port, "--kv-memory", "512MiB", "--hot-only", "on")
    done = launch("codex", *flags, "--", "exec")
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout)
    assert said["cached"] > 100
    assert said["config"]["web_search"] == "disabled" and said["config"]["features"] == {"multi_agent": False}
    assert said["config"]["model_context_window"] == 8192
    assert "prompt tokens were cached" in done.stderr.splitlines()[-1]
    assert "is served on" in (tmp_path / "cache" / f"launch-{port}.log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_a_server_that_does_not_start_says_why(
    program: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    program("aider", "raise SystemExit('it must not be started')")
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEKV_MAX_BODY", "much")
    done = launch("aider", "--model", str(smollm2_path), "--port", free_port(), "--kv-memory", "256MiB")
    assert done.returncode == 1
    assert "ONEKV_MAX_BODY='much'" in done.stderr and "it must not be started" not in done.stderr


def test_ctrl_c_is_for_the_agent(
    server: Any, keys: None, program: Callable[[str, str], None], terminal: Callable[..., Terminal]
) -> None:
    program("aider", PATIENT)
    launched = terminal(sys.executable, "-m", "onekv", "launch", "aider", "--port", port_of(server))
    launched.until("the agent runs")
    launched.sendintr()
    launched.until("the agent was interrupted")
    launched.until("prompt tokens were cached")
    assert launched.end() == 5


def test_who_is_told_to_end_ends_the_agent(server: Any, keys: None, program: Callable[[str, str], None]) -> None:
    program("aider", PATIENT)
    command = [sys.executable, "-m", "onekv", "launch", "aider", "--port", port_of(server)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "the agent runs\n"
    process.send_signal(signal.SIGTERM)
    # The agent has the same stdout: its end is seen there.
    assert process.stdout.read() == ""
    assert process.wait(60) == 128 + signal.SIGTERM


def test_print_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("ONEKV_API_KEYS", raising=False)
    monkeypatch.setenv("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "99")
    port = free_port()
    shown = {}
    for name in AGENTS:
        assert main(["launch", name, "--print", "--port", port, "--kv-memory", "2GiB", "--", "-p", "two words"]) == 0
        shown[name] = capsys.readouterr().out.splitlines()
        assert shown[name][0] == f"# onekv serve smollm2-135m --host 127.0.0.1 --port {port} --kv-memory 2GiB"
        assert shown[name][-1].startswith(f"{name} ") and shown[name][-1].endswith("-p 'two words'")
    url = f"http://127.0.0.1:{port}"
    assert f"export ANTHROPIC_BASE_URL={url}" in shown["claude"]
    assert "unset ANTHROPIC_API_KEY" in shown["claude"]
    # What the user has set stays.
    assert "export CLAUDE_CODE_MAX_OUTPUT_TOKENS=99" in shown["claude"]
    assert f"export OPENAI_API_BASE={url}/v1" in shown["aider"]
    content = next(line for line in shown["opencode"] if "OPENCODE_CONFIG_CONTENT=" in line)
    config = json.loads(content.partition("=")[2].strip("'"))
    assert config["model"] == "onekv/smollm2-135m"
    assert config["provider"]["onekv"]["options"]["baseURL"] == f"{url}/v1"


def test_the_servers_own_file_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "onekv.toml"
    file.write_text(f"""model = "some/model"\nport = {free_port()}\n[hygiene.session]\npattern = 'Session .*'\n""")
    assert main(["launch", "codex", "--print", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "# onekv serve some/model --host 127.0.0.1 --port" in shown and f"--config {file}" in shown


def test_a_file_with_tables_alone(
    tmp_path: Path, program: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], smollm2_path: Path
) -> None:
    program("claude", "raise SystemExit('it must not be started')")
    file = tmp_path / "onekv.toml"
    tables = "\n".join(
        f"""[models.{name}]\nmodel = "{smollm2_path}{end}"\nkv_memory = "64MiB"\n""" for name, end in NAMED
    )
    file.write_text(f"port = {free_port()}\nmemory = '4GiB'\nkv_memory = '1GiB'\n{tables}")
    assert main(["launch", "claude", "--print", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "# onekv serve --host 127.0.0.1 --port" in shown and "export ANTHROPIC_MODEL=small\n" in shown
    # The plan is that of the first table, with its own settings.
    assert main(["launch", "claude", "--config", str(file)]) == 1
    assert "and the KV pool holds 1,408 " in capsys.readouterr().err
    # A table by its name comes first.
    assert main(["launch", "claude", "--print", "--config", str(file), "--model", "other"]) == 0
    shown = capsys.readouterr().out
    assert "# onekv serve other --host" in shown and "export ANTHROPIC_MODEL=other\n" in shown


def test_a_model_by_its_name_of_several_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ONEKV_API_KEYS", raising=False)
    for seed, name in enumerate(("first", "second")):
        save_tiny(tmp_path / name, seed)
    server = start_several(tmp_path, {name: {"model": str(tmp_path / name)} for name in ("first", "second")})
    try:
        for name in ("second", "first", None):
            flags = ["--model", name] if name else []
            assert main(["launch", "aider", "--print", "--port", port_of(server), *flags]) == 0
            shown = capsys.readouterr().out
            assert f"# {server.url} has {name or 'first'}\n" in shown and f"openai/{name or 'first'}" in shown
        assert main(["launch", "aider", "--print", "--port", port_of(server), "--model", "third"]) == 1
        assert "has 'first', 'second'" in capsys.readouterr().err
    finally:
        stop_server(server)


def test_too_little_room_is_told_with_the_numbers(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program("claude", "raise SystemExit('it must not be started')")
    monkeypatch.delenv("ONEKV_API_KEYS", raising=False)
    assert main(["launch", "claude", "--port", free_port(), "--kv-memory", "64MiB"]) == 1
    told = capsys.readouterr().err
    assert "claude sends about 20,300 tokens with its first request and should have room for 49,152" in told
    assert "smollm2-135m has a context of 8,192 tokens (--model" in told and "--kv-memory" in told


def test_what_cannot_be_is_refused(
    server: Any, keys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    port = port_of(server)
    for flags, message in (
        ([], "'claude' is not in the PATH; install it with: npm install"),
        (["--port", "0"], "--port is 0; the agent needs to know the port"),
        (["--kv-memory", "1GiB"], f"--kv-memory applies to a new server, but one is running on {server.url}"),
        (["--model", "mlx-community/other"], "--model is 'mlx-community/other', but the server on"),
    ):
        assert main(["launch", "claude", "--port", port, *flags]) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setenv("ONEKV_API_KEYS", "a-key-that-is-not-its-own")
    assert main(["launch", "claude", "--port", port]) == 1
    assert "returned 401: it requires a different API key" in capsys.readouterr().err


def test_another_server_on_the_port_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"It works!")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert main(["launch", "claude", "--port", str(other.server_port)]) == 1
        other.shutdown()
    assert "is not a OneKV server; choose another port with --port" in capsys.readouterr().err


def test_every_agent_keeps_the_key_out_of_its_arguments(tmp_path: Path) -> None:
    """Other users of the machine can read them."""
    for name, agent in AGENTS.items():
        setup = agent.setup(Served("http://127.0.0.1:1", "model", "a-secret-key", 8192), tmp_path)
        assert not any("a-secret-key" in word for word in setup.arguments), name
        assert "a-secret-key" in setup.variables.values(), name
