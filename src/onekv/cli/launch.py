"""`onekv launch`: runs a coding agent on a OneKV server.

    check      whether the program is installed, and whether its requests fit (from the plan, before anything is loaded)
    serve      use the server that answers on --port, or start one
    show       print what the agent is given
    run        run the agent in the foreground: it has the terminal to itself, including Ctrl-C
    end        stop the server if it was started here, remove the folder, print how much was cached, and exit with the
               agent's status

With --print nothing is started, downloaded or written.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies_environment

from .. import config
from ..config import Settings
from ..errors import SettingError
from ..server.model_settings import ModelSettings
from ..server.models.settings import BudgetSettings
from ..server.settings import ServerSettings
from . import options
from .agents import AGENTS, Agent, Served, Setup
from .asking import NO_KEY, Asking, NoServerError
from .serve import models_given, read_file

if TYPE_CHECKING:
    from ..server.models.spec import ModelSpec

EXAMPLES = """onekv launch claude
  onekv launch claude --model mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit --kv-memory 16GiB
  onekv launch codex --port 9000 -- exec "What does this project do?"
  onekv launch opencode --print                     show what would be started, and how"""
HOST = "127.0.0.1"
# How often a starting server is polled, and how long a stopping one may take in addition to its grace period.
ASK_SECONDS, END_SECONDS = 0.25, 30.0
COUNTED = ("onekv_prompt_tokens_total", "onekv_cached_tokens_total", "onekv_generated_tokens_total")


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES)
    command.usage = "onekv launch AGENT [--print] [--model MODEL] [--port PORT] [--config FILE] [settings] [-- ARGS]"
    command.add_argument("agent", choices=list(AGENTS), help="must be installed; ARGS are passed to it")
    command.add_argument(
        "--print", action="store_true", help="only show what would be started, and with which settings"
    )
    command.add_argument("--model", metavar="MODEL", help=options.MODEL_HELP)
    command.add_argument("--port", metavar="PORT", help="port of the running or new server; default: 8000 (ONEKV_PORT)")
    variable = config.variable("config")
    command.add_argument("--config", metavar="FILE", help=f"TOML file with settings, as for onekv serve ({variable})")
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> int:
    agent = AGENTS[arguments.agent]
    _, file = read_file(arguments)
    given, planned = _wanted(arguments, file)
    server = ServerSettings.resolve({"port": arguments.port, "host": HOST}, file)
    if not server.port:
        raise SettingError("--port is 0; the agent needs to know the port, so choose one")
    url = f"http://{HOST}:{server.port}"
    key = next(iter(server.keys()), NO_KEY)
    asking = Asking(url, key, "choose another port with --port", "ONEKV_API_KEYS")
    program = shutil.which(agent.program)
    command = _serve_command(arguments, given, server.port)
    running = _running(asking, arguments.model)
    if running is not None:
        _same(arguments, url)
    if arguments.print:
        # How much room there will be is known when it runs; here it is what the agent should have.
        served = running or Served(url, planned.name, key, agent.room)
        setup = agent.setup(served, Path("FOLDER"))
        print(_shown(agent, served, setup, arguments.rest, None if running else command))
        return 0
    if program is None:
        raise SettingError(f"{agent.program!r} is not in the PATH; install it with: {agent.install}")
    if running is None:
        _check_plan(arguments.agent, agent, planned)
    with _ending_in_order(), _server(running, command, asking, server.grace) as served:
        if running is not None:
            _check_room(arguments.agent, agent, served.longest, f"the server on {url} accepts")
        before = _figures(served)
        status = _run_agent(agent, program, served, arguments.rest)
        _tell(before, _figures(served))
    return status


def _wanted(arguments: argparse.Namespace, file: dict[str, Any]) -> tuple[list[str], "ModelSpec"]:
    """The models that a new server is given by name, none where tables of the file are enough, and its first one."""
    from ..server.models.spec import specs_of

    def resolve(table: Mapping[str, Any]) -> tuple[Settings, ModelSettings, BudgetSettings]:
        of_model = {**file, **table}
        served, budget = ModelSettings.resolve({}, of_model), BudgetSettings.resolve({}, of_model)
        return options.resolved(Settings, arguments, of_model), served, budget

    given = models_given([arguments.model] if arguments.model else [], file)
    return given, specs_of(given, file.get("models", {}), resolve)[0]


def _serve_command(arguments: argparse.Namespace, models: list[str], port: int) -> list[str]:
    given = {name: getattr(arguments, name) for name in ("config", *Settings.names())}
    flags = [word for name, value in given.items() if value is not None for word in (config.flag(name), value)]
    return [sys.executable, "-m", "onekv", "serve", *models, "--host", HOST, "--port", str(port), *flags]


# The server


def _running(server: Asking, wanted: str | None) -> Served | None:
    """The server that answers there, with the model that is `wanted`, or its first; None if there is no answer.

    Raises SettingError if it is none of ours, not ready, or does not have that model.
    """
    try:
        # Whether it is ready.
        server.json("/health")
        lengths = {model["id"]: model["context_length"] for model in server.json("/v1/models")["data"]}
        first = next(iter(lengths))
    except NoServerError:
        return None
    except (ValueError, KeyError, TypeError, StopIteration):
        raise server.not_ours() from None
    if wanted is None:
        return Served(server.url, first, server.key, lengths[first])
    from ..models.loader import display_name

    name = next((name for name in (wanted, display_name(wanted)) if name in lengths), None)
    if name is None:
        there = ", ".join(repr(each) for each in lengths)
        raise SettingError(f"--model is {wanted!r}, but the server on {server.url} has {there}; stop it or set --port")
    return Served(server.url, name, server.key, lengths[name])


def _same(arguments: argparse.Namespace, url: str) -> None:
    """Raises SettingError if the user asked for another server than the one that runs."""
    given = [name for name in ("config", *Settings.names()) if getattr(arguments, name) is not None]
    if given:
        raise SettingError(
            f"{config.flag(given[0])} applies to a new server, but one is running on {url}; stop it or set --port"
        )


@contextmanager
def _server(running: Served | None, command: list[str], asking: Asking, grace: int) -> Iterator[Served]:
    """The one that runs, or one that ends with the block."""
    if running is not None:
        yield running
        return
    from ..models.paths import cache_dir

    path = cache_dir() / f"launch-{asking.url.rpartition(':')[2]}.log"
    print(f"onekv: starting the server; its log is {path}", file=sys.stderr)
    with path.open("w") as log:
        # In a separate process group: Ctrl-C is for the agent.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
    try:
        yield _ready(process, asking, path)
    finally:
        _stop(process, grace + END_SECONDS)


def _ready(process: "subprocess.Popen[bytes]", asking: Asking, log: Path) -> Served:
    """Waits until it has loaded its model."""
    while process.poll() is None:
        try:
            if (served := _running(asking, None)) is not None:
                return served
        except SettingError:
            # It listens, and loads.
            pass
        time.sleep(ASK_SECONDS)
    last = log.read_text(errors="replace").strip().splitlines()[-5:]
    raise SettingError("the server did not start:\n  " + "\n  ".join(last))


def _stop(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Whether it is enough


def _check_plan(name: str, agent: Agent, spec: "ModelSpec") -> None:
    """Before it is loaded; fetches the model if it must be."""
    from ..memory.plan import make_plan
    from ..models import context_length, load_for

    loaded = load_for(spec.model, spec.engine, lazy=True)
    context = context_length(loaded.config)
    plan = make_plan(loaded.model, spec.engine, context)
    longest = min(plan.longest, context or plan.longest)
    known = f"{context:,} tokens" if context else "unknown length"
    _check_room(
        name,
        agent,
        longest,
        f"{loaded.name} has a context of {known} (--model chooses another), and the KV pool holds {plan.longest:,} "
        "(--kv-memory enlarges it, --kv-format q8 makes tokens smaller): together",
    )


def _check_room(name: str, agent: Agent, longest: int, what: str) -> None:
    """Raises SettingError if not even the first request can fit; warns if there is little room after it."""
    if longest >= agent.room:
        return
    sends = f"{name} sends about {agent.first:,} tokens with its first request and should have room for {agent.room:,}"
    said = f"{sends}; {what} {longest:,} tokens"
    # Another tokenizer may need less.
    if longest < agent.first * 3 // 4:
        raise SettingError(said)
    print(f"onekv: {said}. It may still work.", file=sys.stderr)


# The agent


def _variables(setup: Setup) -> dict[str, str | None]:
    """What is set for the agent, or with None taken away."""
    defaults = {name: os.environ.get(name, value) for name, value in setup.defaults.items()}
    return {**defaults, **setup.variables, **_past_proxies()}


def _past_proxies() -> dict[str, str]:
    """With a proxy in the environment, an agent would ask it for the server on this machine, too."""
    proxies = getproxies_environment()
    others = proxies.pop("no", "")
    excluded = ",".join(([others] if others else []) + [HOST])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), excluded) if proxies else {}


def _shown(agent: Agent, served: Served, setup: Setup, given: list[str], server: list[str] | None) -> str:
    """As a shell would do it."""

    def quoted(text: str) -> str:
        return shlex.quote(text if served.key == NO_KEY else text.replace(served.key, "KEY"))

    lines = [f"# onekv {shlex.join(server[3:])}" if server is not None else f"# {served.url} has {served.model}"]
    lines += [f"# FOLDER/{name}: {text}" for name, text in setup.files.items()]
    for name, value in _variables(setup).items():
        lines.append(f"export {name}={quoted(value)}" if value is not None else f"unset {name}")
    lines.append(" ".join([agent.program, *map(quoted, [*setup.arguments, *given])]))
    return "\n".join(lines)


def _run_agent(agent: Agent, program: str, served: Served, given: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="onekv-launch-") as folder:
        setup = agent.setup(served, Path(folder))
        for name, text in setup.files.items():
            (Path(folder) / name).write_text(text)
        # Stdout is the agent's.
        print(_shown(agent, served, setup, given, None), file=sys.stderr)
        variables = {**os.environ, **_variables(setup)}
        environment = {name: value for name, value in variables.items() if value is not None}
        process = subprocess.Popen([program, *setup.arguments, *given], env=environment)
        try:
            with _deaf():
                status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    # As a shell says it of one that a signal ended.
    return status if status >= 0 else 128 - status


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C is the agent's: it may mean to stop an answer, not to leave."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Told to end, or left by its terminal, it still stops what it has started."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# What was cached


def _figures(served: Served) -> Mapping[str, float]:
    """Of the server, so far, all its models together; nothing where it is not ours to ask."""
    try:
        lines = Asking(served.url, served.key).read("/metrics").decode().splitlines()
    except SettingError:
        return {}
    pairs = [line.rpartition(" ") for line in lines if line.startswith(COUNTED)]
    return {
        counted: sum(float(value) for name, _, value in pairs if name.partition("{")[0] == counted)
        for counted in COUNTED
    }


def _tell(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    if not after:
        print("onekv: the server does not report how much was cached", file=sys.stderr)
        return
    prompt, cached, generated = (int(after[name] - before.get(name, 0)) for name in COUNTED)
    share = f" ({cached / prompt:.1%})" if prompt else ""
    print(
        f"onekv: {cached:,} of {prompt:,} prompt tokens were cached{share}; {generated:,} tokens were generated",
        file=sys.stderr,
    )
