"""No code of ours lets MLX wire more memory. MLX says here what it says on a Mac, and every call is noted."""

import importlib
from typing import Any

import mlx.core as mx
import pytest

import onekv.mlx_lm
from architectures import build
from mlx_lm import server
from onekv import LLM
from onekv.mlx_lm.server import main

# The package has a function of the same name.
generate = importlib.import_module("mlx_lm.generate")


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the limit was set to."""
    limits: list[int] = []
    info = {**mx.device_info(), "max_recommended_working_set_size": 2**34}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: limits.append(limit) or 0)
    return limits


def run_generators(model: Any) -> None:
    with generate.wired_limit(model):
        assert len(list(generate.generate_step(mx.array([1, 2, 3]), model, max_tokens=2))) == 2
    generator = generate.BatchGenerator(model)
    generator.insert([[1, 2, 3]], max_tokens=[2])
    while not any(response.finish_reason for response in generator.next()[1]):
        pass
    generator.close()


def test_with_our_classes_mlx_lm_leaves_the_limit_alone(raised: list[int]) -> None:
    model = build("llama")
    run_generators(model)
    assert raised == [2**34, 0] * 2, "mlx-lm itself raises it"
    raised.clear()
    with onekv.mlx_lm.installed():
        run_generators(model)
    assert raised == []


def test_mlx_server_leaves_the_limit_alone(raised: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(server, "run", lambda *given: started.append(given))
    monkeypatch.setattr("sys.argv", ["mlx_lm.server"])
    server.main()
    assert (len(started), raised) == (1, [2**34]), "mlx-lm itself raises it"
    raised.clear()
    with onekv.mlx_lm.installed():
        main([])
    assert (len(started), raised) == (2, [])


def test_an_llm_leaves_the_limit_alone(raised: list[int]) -> None:
    with LLM(build("llama"), kv_memory="8MB", progress=False) as llm:
        assert len(llm.generate([1, 2, 3], 2).tokens) == 2
    assert raised == []
