"""Names, files, folders and hub ids become models; everything else a sentence."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import Spec, as_mlx, config, weights, write
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_config, save_model

import onekv.models
from onekv.errors import FetchError, ModelFormatError, ModelNotFoundError, SettingError
from onekv.models import DEFAULT_MODEL, context_length, load_model
from onekv.models.gguf_header import read_header
from onekv.models.gguf_tokenizer import build_tokenizer

TOKENS = mx.array([[5, 17, 200, 3, 99, 250]])


def make_folder(folder: Path, dtype: mx.Dtype = mx.float32, bits: int | None = None) -> nn.Module:
    """A model folder written by mlx-lm's own functions; returns the model that was saved."""
    spec = Spec()
    settings = config(spec)
    model = llama.Model(llama.ModelArgs.from_dict(settings))
    model.load_weights(as_mlx(weights(spec)), strict=True)
    model.set_dtype(dtype)
    if bits:
        model, settings = quantize_model(model, settings, group_size=32, bits=bits)
    save_model(folder, model)
    save_config(settings, folder / "config.json")
    write(folder.parent / "tokenizer.gguf", spec)
    build_tokenizer(read_header(folder.parent / "tokenizer.gguf")).save_pretrained(folder)
    return model


def dtypes(model: Any) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_the_context_a_config_tells(config, length):
    assert context_length(config) == length


def test_default_model(smollm2_path: Path) -> None:
    loaded = load_model(DEFAULT_MODEL, lazy=True, progress=False)
    assert loaded.name == DEFAULT_MODEL == "smollm2-135m"
    assert len(loaded.model.layers) == loaded.config["num_hidden_layers"] == 30
    assert loaded.tokenizer.has_chat_template


def test_public_names() -> None:
    assert {name: getattr(onekv.models, name) for name in onekv.models.__all__}
    with pytest.raises(AttributeError):
        _ = onekv.models.nothing


def test_gguf_file(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", Spec(kind=Kind.Q8_0))
    loaded = load_model(str(tmp_path / "tiny.gguf"))
    assert loaded.name == "tiny"
    assert dtypes(loaded.model) == {mx.float32}
    half = load_model(str(tmp_path / "tiny.gguf"), dtype="float16")
    assert dtypes(half.model) == {mx.float16}


def test_folder_round_trip(tmp_path: Path) -> None:
    saved = make_folder(tmp_path / "tiny")
    loaded = load_model(str(tmp_path / "tiny"))
    assert loaded.name == "tiny" and loaded.config["model_type"] == "llama"
    assert mx.array_equal(loaded.model(TOKENS), saved(TOKENS)).item()
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello w")) == "hello w"


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_folder_is_float32_on_cpu(tmp_path: Path, dtype: mx.Dtype) -> None:
    saved = make_folder(tmp_path / "tiny", dtype)
    loaded = load_model(str(tmp_path / "tiny"))
    assert dtypes(loaded.model) == {mx.float32}
    saved.set_dtype(mx.float32)
    assert mx.array_equal(loaded.model(TOKENS), saved(TOKENS)).item()
    kept = load_model(str(tmp_path / "tiny"), dtype="bfloat16")
    assert dtypes(kept.model) == {mx.bfloat16}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_folder_is_unpacked_on_cpu(tmp_path: Path, bits: int) -> None:
    saved = make_folder(tmp_path / "tiny", mx.bfloat16, bits)
    loaded = load_model(str(tmp_path / "tiny"))
    assert dtypes(loaded.model) == {mx.float32}
    assert "quantization" not in loaded.config
    assert isinstance(loaded.model.layers[0].mlp.up_proj, nn.Linear)
    saved.set_dtype(mx.float32)
    assert mx.abs(loaded.model(TOKENS) - saved(TOKENS)).max().item() < 1e-4


def test_other_devices_keep_the_folder_as_it_is(tmp_path: Path) -> None:
    from onekv.models.folder import load_folder

    saved = make_folder(tmp_path / "tiny", mx.bfloat16, 4)
    model, _, settings = load_folder(tmp_path / "tiny", None, dequantize=False, lazy=False)
    assert dtypes(model) == dtypes(saved) == {mx.uint32, mx.bfloat16}
    assert settings["quantization"]["bits"] == 4
    model, _, _ = load_folder(tmp_path / "tiny", mx.float16, dequantize=False, lazy=False)
    assert dtypes(model) == {mx.uint32, mx.float16}


def test_lazy_folder_reads_no_weights(tmp_path: Path) -> None:
    make_folder(tmp_path / "tiny")
    before = mx.get_active_memory()
    loaded = load_model(str(tmp_path / "tiny"), lazy=True)
    assert mx.get_active_memory() - before < 20_000
    eager = load_model(str(tmp_path / "tiny"))
    assert mx.get_active_memory() - before > 300_000
    assert mx.array_equal(loaded.model(TOKENS), eager.model(TOKENS)).item()


def test_a_tokenizer_that_is_there_is_not_read_again(tmp_path: Path) -> None:
    spec = Spec()
    file = tmp_path / "model.gguf"
    write(file, spec)
    make_folder(tmp_path / "folder")
    for path in (file, tmp_path / "folder"):
        first = load_model(str(path))
        again = load_model(str(path), tokenizer=first.tokenizer)
        assert again.tokenizer is first.tokenizer and again.config == first.config


@pytest.mark.parametrize("lazy", [False, True])
def test_no_graph_of_random_weights_is_left(tmp_path: Path, lazy: bool) -> None:
    """The key that they were drawn with is a value, not the operations that led to it."""
    make_folder(tmp_path / "folder")
    mx.random.uniform()
    assert "Split" in graph(mx.random.state[0]), "else it would not be seen"
    load_model(str(tmp_path / "folder"), lazy=lazy)
    assert "Split" not in graph(mx.random.state[0])


def graph(array: mx.array) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue()


def test_dtype_is_checked() -> None:
    with pytest.raises(SettingError, match="--dtype=int4"):
        load_model(DEFAULT_MODEL, dtype="int4")


def test_near_names_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"did you mean {DEFAULT_MODEL}"):
        load_model("SmolLM2-135")
    write(tmp_path / "llama-tiny.gguf", Spec())
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*llama-tiny\.gguf"):
        load_model(str(tmp_path / "llama-tny.gguf"))
    for name in ("", "zzz", "/no/such/folder"):
        with pytest.raises(ModelNotFoundError, match=DEFAULT_MODEL):
            load_model(name)


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"not a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))


def damage_config(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def forget_words(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    tokenizer["model"] |= {"vocab": {}, "merges": []}
    file.write_text(json.dumps(tokenizer))


DAMAGE = {
    "no config.json": lambda f: (f / "config.json").unlink(),
    "config.json is damaged": lambda f: cut(f / "config.json", 20),
    "has no model_type": lambda f: (f / "config.json").write_text("{}"),
    "model.safetensors is missing": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is truncated": lambda f: cut(f / "model.safetensors", 200_000),
    "model.safetensors is damaged": lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
    "nonesuch": lambda f: damage_config(f, model_type="nonesuch"),
    "hidden_size": lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
    "cannot be loaded": lambda f: damage_config(f, hidden_size=128),
    "model-2.safetensors is missing": lambda f: (f / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    ),
    "has no tokenizer: tokenizer.json": lambda f: (f / "tokenizer.json").unlink(),
    "a tokenizer that encodes no text": lambda f: forget_words(f / "tokenizer.json"),
}


@pytest.mark.parametrize("named", DAMAGE)
def test_damaged_folders_are_one_sentence(tmp_path: Path, named: str) -> None:
    make_folder(tmp_path / "tiny")
    DAMAGE[named](tmp_path / "tiny")
    with pytest.raises(ModelFormatError, match=named) as caught:
        load_model(str(tmp_path / "tiny"))
    assert "tiny" in str(caught.value) and "\n" not in str(caught.value)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    make_folder(tmp_path / "tiny")
    for file in (tmp_path / "tiny").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelFormatError, match="has no tokenizer"):
        load_model(str(tmp_path / "tiny"))


def test_folder_with_only_a_gguf_file_names_it(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", Spec())
    with pytest.raises(ModelFormatError, match=r"it has m\.gguf, give that file"):
        load_model(str(tmp_path))


def in_process(name: str, tmp_path: Path, **environment: str) -> str:
    """Loads `name` in a new process, because the hub's library reads its settings at import."""
    code = (
        "from onekv.errors import OneKVError\nfrom onekv.models import load_model\n"
        f"try: print('loaded', load_model({name!r}).name)\n"
        "except OneKVError as error: print(type(error).__name__, error)\n"
    )
    settings = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    result = subprocess.run(
        [sys.executable, "-c", code],
        text=True,
        capture_output=True,
        env=os.environ | settings,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_hub_cannot_be_reached(tmp_path: Path) -> None:
    message = in_process("some-org/some-model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert message.startswith("FetchError some-org/some-model") and "\n" not in message
    assert "local folder" in message


def test_hub_model_from_the_local_cache(tmp_path: Path) -> None:
    commit = "0" * 40
    cached = tmp_path / "hub" / "hub" / "models--some-org--tiny"
    make_folder(tmp_path / "tiny")
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(tmp_path / "tiny", cached / "snapshots" / commit)
    message = in_process("some-org/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert message == "loaded some-org/tiny"


@pytest.mark.parametrize(
    ("code", "kind", "named"),
    [
        ("RepoNotFound", "ModelNotFoundError", "nor a model on the Hugging Face hub"),
        ("GatedRepo", "ModelNotFoundError", "gated"),
    ],
)
def test_hub_refusals(tmp_path: Path, code: str, kind: str, named: str) -> None:
    """A real server that answers as the hub does for a missing or gated repository."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        message = in_process("some-org/tiny", tmp_path, HF_ENDPOINT=url, NO_PROXY="127.0.0.1")
        server.shutdown()
    assert message.startswith(kind) and named in message


def test_interrupt_while_loading_propagates(smollm2_path: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from onekv.models import load_model\nprint('ready', flush=True)\n"
        f"for _ in range(50): load_model({str(smollm2_path)!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_fetch_errors_reach_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("ONEKV_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(FetchError, match=r"127\.0\.0\.1"):
        load_model(DEFAULT_MODEL, progress=False)
