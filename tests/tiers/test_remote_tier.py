"""Two servers, one store: what one has computed the other reads, and answers as if it had computed it itself."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.nn as nn
import pytest
from remote_parts import (
    BLOCK,
    SLOW,
    Cluster,
    SlowLink,
    Valkey,
    ask,
    flush,
    llm_of,
    object_store,
    prompt_of,
    reading_is_worth_it,
    remote,
    until,
)

from architectures import build
from onekv import LLM
from onekv.engine import Request
from onekv.errors import SettingError
from onekv.prefix import loading
from onekv.tiers.remote import opening
from onekv.tiers.remote import tier as remote_tier


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared?timeout={SLOW}"


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    yield server
    server.stop()


def begun_and_continued(name: str | nn.Module, url: str, **settings: object) -> None:
    """A conversation begun on one server and continued on another has the tokens of an uncached run."""
    prompt = prompt_of(1)
    with llm_of(name, url, **settings) as first:
        answer, cached = ask(first, prompt)
        assert cached == 0
        flush(first)
        assert remote(first).writes >= len(prompt) // BLOCK and remote(first).failed is None
    longer = [*prompt, *answer, *prompt_of(2, 21)]
    with llm_of(name, url, **settings) as second:
        found, cached = ask(second, longer)
        assert cached >= 150 // BLOCK * BLOCK and remote(second).hits >= 150 // BLOCK
        assert remote(second).corrupt == 0
    with llm_of(name, prefix_cache=False, **settings) as alone:
        assert ask(alone, prompt)[0] == answer
        assert ask(alone, longer)[0] == found


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_begun_on_one_server_and_continued_on_another(name, folder, no_thread_dies):
    """Full attention, windows, and recurrent states beside it; over a shared folder."""
    begun_and_continued(name, folder)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("kv_format", ["q8", "q6", "q5", "q4", "k8v4", "k6v4", "k5v4", "tq4", "tq3", "tq2"])
def test_encoded_blocks_come_back_as_they_were(name, kv_format, folder, no_thread_dies):
    """With windows, and beside recurrent states, too."""
    begun_and_continued(build(name, head_dim=32), folder, kv_format=kv_format)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_over_valkey(name, valkey, no_thread_dies):
    begun_and_continued(name, valkey.url(more="&ttl=1h"))
    lives = [valkey.client().ttl(key) for key in valkey.names()]
    assert lives and all(3000 < left <= 3600 for left in lives)


def test_over_valkey_with_a_password_and_in_a_cluster(tmp_path, no_thread_dies):
    server = Valkey(tmp_path, password="of the store")
    begun_and_continued("llama", server.url().replace("of the store", "of%20the%20store"))
    server.stop()
    server = Cluster(tmp_path)
    begun_and_continued("llama", server.url())
    server.stop()


def test_over_an_object_store(monkeypatch, no_thread_dies):
    with object_store() as (known, client):
        for name, value in known.items():
            monkeypatch.setenv(name, value)
        begun_and_continued("llama", f"s3://kv-blocks/some/where?timeout={SLOW}")
        names = [each["Key"] for each in client.list_objects_v2(Bucket="kv-blocks")["Contents"]]
        assert all(name.startswith("some/where/onekv/") for name in names)


def test_what_is_in_the_store_is_the_file_of_the_disk_cache(tmp_path, folder):
    with llm_of(url=folder, disk_cache=str(tmp_path / "disk"), disk_limit="100MB", disk_policy="write_through") as llm:
        ask(llm, prompt_of(1))
        flush(llm)
        assert {tier.name for tier in llm.stats().tiers} == {"disk", "remote"}
    on_disk = {path.name: path for path in (tmp_path / "disk").rglob("*.safetensors")}
    shared = list((tmp_path / "shared").rglob("*.safetensors"))
    assert len(shared) >= 150 // BLOCK
    for path in shared:
        same = on_disk[path.name]
        assert path.read_bytes()[:-64] == same.read_bytes()
        assert path.parts[-3:] == same.parts[-3:]


def test_a_disk_is_asked_first_and_the_rest_comes_from_the_store(tmp_path, folder):
    disk = {"disk_cache": str(tmp_path / "disk"), "disk_limit": "100MB"}
    prompt = prompt_of(1)
    with llm_of(url=folder, **disk) as llm:
        ask(llm, prompt[:80])
    with llm_of(url=folder) as llm:
        answer, _ = ask(llm, prompt)
    with llm_of(url=folder, **disk) as llm:
        assert ask(llm, prompt) == (answer, 144)
        hits = {tier.name: tier.hits for tier in llm.stats().tiers}
        assert hits["disk"] >= 4 and hits["disk"] + hits["remote"] == 9


def test_only_what_was_used_twice_is_written_unless_all_is_asked_for(tmp_path, folder):
    count = lambda: len(list((tmp_path / "shared").rglob("*.safetensors")))  # noqa: E731
    with llm_of(url=folder, remote_write="off") as llm:
        ask(llm, prompt_of(1))
        ask(llm, prompt_of(1))
        flush(llm)
        assert count() == 0
    with llm_of(url=folder, remote_write="twice") as llm:
        ask(llm, prompt_of(1))
        flush(llm)
        assert count() == 0
        # The same beginning, of five blocks.
        ask(llm, [*prompt_of(1)[: 5 * BLOCK], *prompt_of(2, 60)])
        flush(llm)
        assert count() == 5
    assert count() == 5


def test_a_queue_that_is_small_takes_all_of_it_in_the_end(folder, tmp_path):
    """What is wanted waits in the pool, not in the queue."""
    with llm_of(url=folder, remote_write_rate="2MB") as llm:
        ask(llm, prompt_of(1, 400))
        tier = llm.engine.prefix.tiers[-1]
        assert tier.stats().queued_bytes <= llm.plan.remote_out < 25 * 9000
    # Closing waits for it.
    assert len(list((tmp_path / "shared").rglob("*-0.safetensors"))) == 25


def test_what_is_beyond_the_rate_waits(folder, tmp_path, monkeypatch):
    """And requests do not: at 100 bytes a second the second block is due after a minute and a half."""
    monkeypatch.setattr(remote_tier, "CLOSE_SECONDS", 0.1)
    with llm_of(url=folder, remote_write_rate=100) as llm:
        ask(llm, prompt_of(1))
        until(lambda: remote(llm).writes == 1)
        llm.engine.prefix.share(1.0)
        llm.engine.prefix.tiers[-1]._writes.flush(1.0)
        assert remote(llm).writes == 1 and remote(llm).queued_bytes
        assert ask(llm, prompt_of(2, 40))[1] == 0
    # Nor does the end of the process, which only sends the one whose turn was next.
    assert len(list((tmp_path / "shared").rglob("*-0.safetensors"))) <= 2


def test_what_is_slower_than_computing_is_computed(folder):
    with llm_of(url=folder) as llm:
        answer, _ = ask(llm, prompt_of(1))
    with llm_of(url=folder) as llm:
        for _ in range(50):
            llm.engine.prefix.computed(10**9, 1e-3)
        until(lambda: remote(llm).latency)
        assert ask(llm, prompt_of(1)) == (answer, 0)
        assert remote(llm).not_worth >= 1 and remote(llm).hits == 0


def test_what_a_user_drops_stays_in_the_store_and_what_may_be_wrong_does_not(folder, tmp_path):
    count = lambda: len(list((tmp_path / "shared").rglob("*-0.safetensors")))  # noqa: E731
    prompt = prompt_of(1)
    with llm_of(url=folder) as llm:
        answer, _ = ask(llm, prompt)
        flush(llm)
        prefix, tier = llm.engine.prefix, llm.engine.prefix.tiers[-1]
        first = next(node for node in prefix.index.nodes.values() if node.start == 0)
        assert prefix.drop_node(first) == 10 and prefix.index.nodes == {}
        # Whatever is to be removed is, before what comes after it is written.
        ask(llm, prompt_of(2))
        flush(llm)
        assert count() == 18
        # As for other servers, it is still there.
        reading_is_worth_it(llm)
        assert ask(llm, prompt) == (answer, 144)
        node = next(node for node in prefix.index.nodes.values() if node.end == 144)
        while node.children:
            prefix._store.remove(next(iter(node.children.values())))
        # A request failed.
        prefix._store.discard(node)
        ask(llm, prompt_of(3))
        flush(llm)
        until(lambda: count() == 18)
        assert tier.stats().failed is None


def test_another_secret_is_another_space(folder):
    with llm_of(url=folder) as llm:
        answer, _ = ask(llm, prompt_of(1))
    with llm_of(url=folder, tier_secret="another secret, as long") as llm:
        assert ask(llm, prompt_of(1)) == (answer, 0)
        assert remote(llm).corrupt == 0
    with llm_of(url=folder) as llm:
        assert ask(llm, prompt_of(1)) == (answer, 144)


def test_others_are_decoded_while_one_is_loading(valkey):
    prompt, other = prompt_of(1, 600), prompt_of(2, 20)
    with llm_of(url=valkey.url()) as llm:
        ask(llm, prompt, 1)
    # Each block is on its way for longer than a step takes.
    link = SlowLink(valkey.port, 0.05)
    with llm_of(url=valkey.url().replace(str(valkey.port), str(link.port))) as llm, llm_of() as alone:
        reading_is_worth_it(llm)
        engine, talker, loader = llm.engine, Request(other, 300), Request(prompt, 4)
        engine.submit(talker)
        while not talker.tokens:
            engine.step()
        engine.submit(loader)
        while loader.state != "loading":
            engine.step()
        before = len(talker.tokens)
        while loader.state == "loading":
            during = len(talker.tokens)
            engine.step()
        assert during > before
        while not engine.idle:
            engine.step()
        assert loader.cached_tokens == 592
        assert (list(talker.tokens), list(loader.tokens)) == (ask(alone, other, 300)[0], ask(alone, prompt, 4)[0])
    link.close()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_where_the_host_has_no_access_to_the_pool(name, folder, monkeypatch):
    """As on CUDA: parts go beside the pool first, few at a time."""
    monkeypatch.setattr(loading, "shared_memory", lambda: False)
    monkeypatch.setattr(loading, "AT_ONCE", 2)
    begun_and_continued(name, folder)


def test_the_plan_has_what_is_on_its_way(folder):
    with llm_of(url=folder) as llm, llm_of() as alone:
        assert llm.plan.remote_out and llm.plan.remote_in
        assert llm.plan.total - llm.plan.remote_staging == alone.plan.total
        assert "remote: 0 blocks read, 0 written" in repr(llm.stats())


def test_a_package_that_is_missing_is_named(folder):
    """In a process that cannot import it."""
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from onekv.config import Settings\nfrom onekv.tiers.remote import opening\n"
        "place, _ = opening.check(Settings(remote_tier='file:///shared'))\nopening._open_store(place, 1.0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=environment, timeout=120)
    assert "but obstore is not installed; pip install 'onekv[remote]'" in done.stderr


def test_a_wrong_url_is_an_error_before_the_model_is_loaded():
    with pytest.raises(SettingError, match="begins with 'memcached'"):
        LLM("no such model", remote_tier="memcached://cache")
    assert opening.check(llm_of().settings) is None
