"""Settings of the disk cache, and the folders of several processes."""

import os
import subprocess
import sys

import numpy as np
import pytest

import onekv.engine.known
from onekv import LLM
from onekv.config import Settings
from onekv.errors import SettingError
from onekv.memory.plan import make_plan
from onekv.tiers.opening import default_folder, disk_limit, open_tier, stored_as
from stock import engine_of, small_llama


@pytest.fixture(scope="module")
def model():
    """2 MiB of KV in each block of 64 tokens."""
    return small_llama(3, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=8, head_dim=128)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"hot_only": True, "disk_cache": "x"}, "--hot-only is on, but --disk-cache is 'x'"),
        ({"prefix_cache": False, "disk_cache": "x"}, "--prefix-cache is off"),
        ({"disk_cache": " "}, "--disk-cache is empty"),
        ({"disk_policy": "sometimes"}, "--disk-policy is 'sometimes'; it must be one of write_back, write_through"),
        ({"disk_limit": "much"}, "--disk-limit='much' is not a size"),
        ({"disk_write_budget": "10%"}, "a percentage has no meaning here"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(SettingError, match=words):
        Settings(**settings)


def test_a_limit_without_a_disk_cache_is_refused(model):
    with pytest.raises(SettingError, match="--disk-limit is '1GB', but there is no disk cache"):
        engine_of(model, kv_memory="80MiB", disk_limit="1GB")


def test_a_queue_too_small_for_two_blocks_is_refused(model, tmp_path):
    with pytest.raises(Exception, match=r"--disk-queue is 1\.00 MiB, but two blocks"):
        engine_of(model, kv_memory="80MiB", disk_cache=str(tmp_path), disk_queue="1MiB")


def test_the_default_limit_is_a_tenth_of_what_is_free(tmp_path):
    status = os.statvfs(tmp_path)
    limit = disk_limit(Settings(disk_cache=str(tmp_path / "new")), tmp_path / "new")
    free = status.f_bavail * status.f_frsize
    assert limit == 10 * 10**9 or abs(limit - free // 10) < free // 100
    assert not (tmp_path / "new").exists()


SCRIPT = """
import sys
from onekv import LLM
with LLM({model!r}, kv_memory="64MiB", disk_cache={folder!r}, progress=False) as llm:
    completion = llm.generate([int(word) for word in sys.argv[1].split()], max_tokens=6)
    print(completion.cached_tokens, *completion.tokens)
    print(llm.stats().tiers[0].failed, file=sys.stderr)
"""


def test_the_default_model_continues_in_another_process(smollm2_path, tmp_path):
    prompt = np.random.default_rng(9).integers(0, 128, 2 * 64 + 20).tolist()
    script = SCRIPT.format(model=str(smollm2_path), folder=str(tmp_path / "kv"))
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-c", script, " ".join(map(str, prompt))]
        outputs.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert [outputs[0][0], outputs[1][0]] == ["0", str(2 * 64)]
    assert outputs[0][1:] == outputs[1][1:]


def test_a_second_user_goes_without_the_shared_folder_and_is_refused_others(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path))
    first = engine_of(model, kv_memory="80MiB", disk_cache=str(default_folder()), disk_limit="2GB")
    settings = Settings(disk_cache="auto", kv_memory="80MiB")
    plan = make_plan(model, settings, None)
    assert open_tier(settings, plan, stored_as(model, plan), "a model") is None
    assert any(f"pid {os.getpid()}" in record.getMessage() for record in caplog.records)
    with pytest.raises(Exception, match="is already in use by this process"):
        engine_of(model, kv_memory="80MiB", disk_cache=str(default_folder()), disk_limit="2GB")
    first.close()


def test_weights_are_hashed_once_for_all_tiers(model, tmp_path, monkeypatch):
    hashed = []
    identity = onekv.engine.known.identity
    monkeypatch.setattr(onekv.engine.known, "identity", lambda model: hashed.append(model) or identity(model))
    tiers = {"disk_cache": str(tmp_path / "kv"), "disk_limit": "2GB", "remote_tier": f"file://{tmp_path}/shared"}
    LLM(model, kv_memory="80MiB", **tiers).close()
    assert len(hashed) == 1
    LLM(model, kv_memory="80MiB").close()
    assert len(hashed) == 1, "nor where there are no tiers"


def test_a_store_that_cannot_be_opened_leaves_the_folder_free(model, tmp_path, monkeypatch):
    disk = {"disk_cache": str(tmp_path / "kv"), "disk_limit": "2GB", "kv_memory": "80MiB"}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "redis", None)
        with pytest.raises(SettingError, match="redis is not installed"):
            engine_of(model, remote_tier="redis://127.0.0.1:9", tier_secret="none", **disk)
    engine_of(model, **disk).close()


def test_close_is_allowed_twice_and_the_folder_is_free_afterwards(smollm2_path, tmp_path):
    llm = LLM(str(smollm2_path), kv_memory="64MiB", disk_cache=str(tmp_path), progress=False)
    llm.close()
    llm.close()
    LLM(str(smollm2_path), kv_memory="64MiB", disk_cache=str(tmp_path), progress=False).close()
