"""docs/grafana.json asks for nothing that a real server does not expose: metrics by name, and their labels."""

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from several import complete, start_several

from conftest import Server, stop_server
from onekv.bench.soak import save_tiny

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
# Prometheus adds it to every series.
ADDED = {"instance"}


def queries() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["query"]["query"] for each in VARIABLES.values() if each["type"] == "query")


def wanted() -> dict[str, set[str]]:
    """The labels by which each metric is selected or grouped in some query."""
    found: dict[str, set[str]] = defaultdict(set)
    for query in queries():
        # In the legend of a query that groups, only these are left.
        grouped = {name for names in re.findall(r"\bby \(([\w, ]+)\)", query) for name in re.split(r",\s*", names)}
        for name, selectors in re.findall(r"\b(onekv_\w+)(?:\{([^}]*)\})?", query):
            found[name] |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors)) | grouped
    return found


def exposed(url: str, **headers: str) -> dict[str, set[str]]:
    """The labels of each metric of a server."""
    answer = httpx.get(f"{url}/metrics", headers=headers, timeout=60)
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    tables: dict[str, dict[str, Any]] = {
        name: {"model": save_tiny(folder / name, seed)} for seed, name in enumerate(("red", "blue"))
    }
    flags = ("--disk-cache", str(folder / "disk"), "--disk-limit", "1GB", "--kv-events", "tcp://127.0.0.1:0")
    server = start_several(folder, tables, *flags)
    yield server
    stop_server(server)


def test_several_models_expose_all_that_it_asks_for(several: Server) -> None:
    for name in ("red", "blue"):
        complete(several, name)
    found = exposed(several.url)
    missing = {name: labels - found[name] - ADDED for name, labels in wanted().items() if name in found}
    assert wanted().keys() - found.keys() == set()
    assert {name: labels for name, labels in missing.items() if labels} == {}


def test_one_model_exposes_all_but_what_is_of_several(server: Server) -> None:
    key = {"x-api-key": server.keys[0]}
    # There are misses from the first on.
    body = {"model": "default", "prompt": "A prompt that the dashboard's test alone has.", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=key, timeout=120).status_code == 200
    found = exposed(server.url, **key)
    missing = wanted().keys() - found.keys()
    # This one has no router to tell of events.
    assert all(name.startswith(("onekv_model_", "onekv_memory_", "onekv_kv_event")) for name in missing), missing
    # A single one has no name in its metrics: its series are those of all models, and must not be left out.
    assert VARIABLES["model"]["allValue"] == ".*" and VARIABLES["model"]["includeAll"]


@pytest.fixture
def prometheus(several: Server, tmp_path: Path) -> Iterator[str]:
    """A real one that scrapes the server; its address."""
    targets = [{"targets": [several.url.removeprefix("http://")]}]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "onekv", "static_configs": targets}]}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML.
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_answers_every_query_with_data(several: Server, prometheus: str) -> None:
    wanted = {target["expr"] for panel in PANELS for target in panel["targets"]}
    deadline = time.monotonic() + 120
    # Rates and quantiles need requests between two scrapes.
    while wanted and time.monotonic() < deadline:
        for name in ("red", "blue"):
            complete(several, name)
        time.sleep(1)
        wanted = {query for query in wanted if not answered(prometheus, query)}
    assert not wanted


def answered(url: str, query: str) -> bool:
    """Whether it has a result, with the variables as Grafana puts them in for all servers and models."""
    for name, value in (("$instance", ".*"), ("$model", ".*"), ("$__rate_interval", "1m")):
        query = query.replace(name, value)
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=60)
    except httpx.ConnectError:
        return False  # it is starting
    if answer.status_code == 503:
        return False
    assert answer.status_code == 200, answer.text
    result = answer.json()["data"]["result"]
    return any(not math.isnan(float(series["value"][1])) for series in result)


def test_it_shows_what_it_is_for() -> None:
    assert {
        *("onekv_process_bytes", "onekv_memory_limit_bytes", "onekv_kv_pool_bytes", "onekv_prefix_hits_total"),
        *("onekv_prefix_misses_total", "onekv_generated_tokens_total", "onekv_time_to_first_token_seconds_bucket"),
        *("onekv_requests_waiting", "onekv_tier_bytes", "onekv_tier_limit", "onekv_model_state"),
        *("onekv_tier_up", "onekv_tier_latency", "onekv_kv_events_total", "onekv_kv_event_blocks"),
    } <= wanted().keys()


def test_it_can_be_imported_anywhere() -> None:
    assert VARIABLES["datasource"]["type"] == "datasource" and VARIABLES["datasource"]["query"] == "prometheus"
    asked = [*PANELS, *(target for panel in PANELS for target in panel["targets"])]
    asked += [each for each in VARIABLES.values() if each["type"] == "query"]
    assert {each["datasource"]["uid"] for each in asked} == {"${datasource}"}
    assert "id" not in DASHBOARD and DASHBOARD["uid"] == "onekv"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_grafanas_own_classes_read_all_of_it() -> None:
    """The SDK is generated from Grafana's schema: what it does not know is lost when it writes what it has read."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="the dev group is out of date")
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()
    read = models.Dashboard.from_json(json.loads(json.dumps(DASHBOARD)))
    written = json.loads(json.dumps(read, cls=encoder.JSONEncoder))
    # Grafana's editor writes it beside a variable's query; its schema does not have it.
    assert [
        each for each in lost(DASHBOARD, written) if not re.fullmatch(r"/templating/list/\d/definition", each)
    ] == []
    options = [panel.options for panel in read.panels if panel.type_val != "row"]
    assert {type(each).__module__.rpartition(".")[2] for each in options} == {"timeseries"}


def lost(some: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where `other` lacks something that `some` has, or has something else there."""
    if isinstance(some, dict) and isinstance(other, dict):
        for name in some:
            yield from lost(some[name], other.get(name), f"{at}/{name}")
    elif isinstance(some, list) and isinstance(other, list) and len(some) == len(other):
        for index, (one, two) in enumerate(zip(some, other, strict=True)):
            yield from lost(one, two, f"{at}/{index}")
    elif some != other:
        yield at


def test_no_two_panels_lie_in_the_same_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24 and panel["title"]
        taken |= cells
