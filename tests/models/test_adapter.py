"""LoRA adapters around a model's layers: as exact as mlx-lm's own, over weights that are in memory once."""

import gc
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import gguf_files
import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama
from mlx_lm.utils import save_config
from mlx_lm.utils import save_model as save_folder
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from adapters import greedy, save_adapter, stock_model
from architectures import ARCHITECTURES, build
from onekv import LLM
from onekv.bench.clients import save
from onekv.errors import ModelFormatError, OneKVError, SettingError
from onekv.memory.looped import LoopedDecode
from onekv.models import DEFAULT_MODEL, load_model, share
from onekv.models.adapted import adapter_bytes
from onekv.models.adapter import adapt, read_adapter
from onekv.models.identity import identity
from onekv.models.joined import Part, join_products
from onekv.models.packed import PackedLinear
from onekv.models.sharing import _arrays as arrays_of
from onekv.models.sharing import compute, copy_sharing

PROMPT = [7 * i % 61 + 1 for i in range(40)]
SETTINGS: dict[str, Any] = {"kv_memory": "8MB", "block_size": 16, "prefill_chunk": 64, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def save_model(folder: Path, name: str, bits: int | None = None) -> str:
    """An architecture of the tests as a folder."""
    path = folder / f"{name}-{bits}"
    if not path.exists():
        architecture, model = ARCHITECTURES[name], build(name)
        config: dict[str, Any] = {"model_type": architecture.module, **architecture.config}
        if bits is not None:
            quantize(model, group_size=32, bits=bits)
            config["quantization"] = {"group_size": 32, "bits": bits}
        tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(ByteLevel.alphabet())}, []))
        tokenizer.pre_tokenizer = ByteLevel()
        save(path, model, config, PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    return str(path)


def active() -> int:
    gc.collect()
    return mx.get_active_memory()


def generated(llm: LLM, count: int = 12) -> list[int]:
    return list(llm.generate(PROMPT, count, ignore_eos=True).tokens)


@pytest.mark.parametrize(
    ("name", "bits", "kind"),
    [
        ("llama", None, "lora"),
        ("llama", 4, "dora"),
        ("llama", 8, "lora"),
        ("qwen2", None, "dora"),
        ("qwen2", 4, "lora"),
    ],
)
def test_as_exact_as_mlx_lm(folder: Path, name: str, bits: int | None, kind: str) -> None:
    """qwen2 has biases. Packed layers stay packed, and decode steps are compiled."""
    base = save_model(folder, name, bits)
    adapter = save_adapter(folder / f"{name}-{bits}-{kind}", base, 1, kind, layers=2)
    stock = stock_model(base, adapter)
    tokens, logits = greedy(stock, PROMPT, 12)
    plain, _ = greedy(stock_model(base), PROMPT, 12)
    assert tokens != plain, "else the adapter would not be seen"
    loaded = load_model(base, adapter=adapter, packed=True).model
    assert mx.abs(loaded(mx.array([PROMPT]))[0, -1] - logits[0]).max() < 1e-4
    with LLM(base, adapter=adapter, **SETTINGS) as llm:
        assert isinstance(llm.engine.runner.compiled, LoopedDecode) and llm.stats().uncompiled is None
        assert any(isinstance(layer, PackedLinear) for layer in llm.model.modules()) is (bits is not None)
        done = llm.generate(PROMPT, 12, ignore_eos=True, logprobs=1)
        assert list(done.tokens) == tokens
        wanted = mx.max(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1).tolist()
        assert done.logprobs is not None
        assert [each.logprob for each in done.logprobs] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("bits", [None, 4])
def test_experts_and_embeddings(folder: Path, bits: int | None) -> None:
    """Programs do not know products of chosen experts: the steps are MLX's own, and that is said."""
    base = save_model(folder, "qwen3_moe", bits)
    keys = ["self_attn.q_proj", "mlp.gate", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj", "model.embed_tokens"]
    adapter = save_adapter(folder / f"experts-{bits}", base, 2, keys=keys)
    tokens, logits = greedy(stock_model(base, adapter), PROMPT, 12)
    assert tokens != greedy(stock_model(base), PROMPT, 12)[0]
    loaded = load_model(base, adapter=adapter, packed=True).model
    assert mx.abs(loaded(mx.array([PROMPT]))[0, -1] - logits[0]).max() < 1e-4
    with LLM(base, adapter=adapter, **SETTINGS) as llm:
        assert generated(llm) == tokens
        assert "GatherMM" in str(llm.stats().uncompiled) or "GatherQMM" in str(llm.stats().uncompiled)


@pytest.mark.parametrize(
    ("name", "bits", "kind"),
    [("llama", None, "lora"), ("qwen2", None, "dora"), ("qwen2", 4, "lora"), ("qwen2", 4, "dora")],
)
def test_joined_products_are_adapted_one_by_one(folder: Path, name: str, bits: int | None, kind: str) -> None:
    """As on a GPU: q, k and v are parts of one product."""
    base = save_model(folder, name, bits)
    adapter = save_adapter(folder / f"{name}-{bits}-{kind}", base, 1, kind, layers=2)
    model = stock_model(base)
    assert join_products(model) > 0
    adapt(model, read_adapter(adapter), None, lazy=False)
    assert isinstance(model.layers[-1].self_attn.k_proj.linear, Part)
    stock = stock_model(base, adapter)
    x = mx.array([PROMPT])
    assert mx.abs(model(x) - stock(x)).max() < 1e-4
    # Each engine has a tree of its own, and products of its own.
    copied = copy_sharing(model)
    assert copied.layers[-1].self_attn.q_proj.linear._joint is not model.layers[-1].self_attn.q_proj.linear._joint
    assert mx.abs(copied(x) - stock(x)).max() < 1e-4


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_copy_has_the_same_arrays_and_gives_the_same(name: str) -> None:
    model = build(name)
    compute(model)
    before = active()
    copied = copy_sharing(model)
    compute(copied)
    assert active() == before
    assert copied is not model and copied.layers[0] is not model.layers[0]
    x = mx.array([PROMPT[:8]])
    assert mx.array_equal(copied(x), model(x))


def test_weights_are_in_memory_once(folder: Path) -> None:
    base = save_model(folder, "llama", 4)
    adapters = [save_adapter(folder / f"once-{seed}", base, seed) for seed in (1, 2)]
    before = active()
    alone, taken, weight = [], [], []
    for adapter in (None, *adapters):
        with LLM(base, adapter=adapter, **SETTINGS) as llm:
            taken.append(active() - before)
            weight.append(llm.plan.weights)
            alone.append(generated(llm))
        del llm
    assert len({tuple(tokens) for tokens in alone}) == 3 and active() == before
    weights = load_model(base, packed=True)
    llms = [LLM(weights, adapter=adapter, **SETTINGS) for adapter in (None, *adapters)]
    # But for odds and ends, of other tests in this process, too: not even once more than once.
    assert active() - before - (sum(taken) - 2 * weight[0]) < weight[0]
    once = {id(array) for array in arrays_of(weights.model)}
    assert all(once <= {id(array) for array in arrays_of(llm.model)} for llm in llms)
    own = [adapter_bytes(llm.model) for llm in llms]
    assert own == [0, weight[1] - weight[0], weight[2] - weight[0]] and own[1] > 0
    assert [llm.plan.weights for llm in llms] == weight
    # In any order: what one needs stays.
    del weights
    assert [generated(llm) for llm in llms] == alone
    llms.pop(0).close()
    assert [generated(llm) for llm in llms] == alone[1:]
    for llm in llms:
        llm.close()
    del llms, llm
    assert active() == before


@pytest.mark.parametrize("bits", [None, 4])
def test_engines_read_the_same_weights_at_once(folder: Path, bits: int | None) -> None:
    """Prompts unpack weights into a buffer of each engine's own."""
    base = save_model(folder, "llama", bits)
    adapters = [None, *(save_adapter(folder / f"once-{seed}", base, seed) for seed in (1, 2))]
    prompt = PROMPT * 6
    stocks = [stock_model(base, adapter) for adapter in adapters]
    wanted = [greedy(stock, prompt, 8)[0] for stock in stocks]
    weights, found = load_model(base, packed=True), {}
    copy_sharing(weights.model)

    def work(number: int) -> None:
        with LLM(weights, adapter=adapters[number], prefix_cache=False, **SETTINGS) as llm:
            found[number] = [list(llm.generate(prompt, 8, ignore_eos=True).tokens) for _ in range(6)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [wanted[number]] * 6 for number in range(3)}


def test_whose_blocks_they_are(folder: Path) -> None:
    """The base, each adapter, and each state of its files have blocks of their own."""
    base = save_model(folder, "llama", 4)
    weights = load_model(base, packed=True)
    adapter = Path(save_adapter(folder / "named", base, 3, layers=2))
    seen = [identity(weights.model), identity(share(weights, adapter=str(adapter)).model)]
    assert identity(share(weights).model) == seen[0]
    assert identity(load_model(base, adapter=str(adapter), packed=True).model) == seen[1], "shared or not"
    moved = shutil.copytree(adapter, folder / "moved", dirs_exist_ok=True)
    assert identity(share(weights, adapter=str(moved)).model) == seen[1], "its content counts"
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] += 1
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    seen.append(identity(share(weights, adapter=str(adapter)).model))
    save_adapter(adapter, base, 4, layers=2)
    seen.append(identity(share(weights, adapter=str(adapter)).model))
    assert len(set(seen)) == 4
    # Of mlx-lm's own layers, too.
    stock = stock_model(base, str(adapter))
    before = identity(stock)
    stock.layers[-1].self_attn.q_proj.scale = 1.0
    assert identity(stock) != before


def test_the_disk_cache_never_mixes_them(folder: Path, tmp_path: Path) -> None:
    """Over restarts, and where the file was changed in place."""
    base = save_model(folder, "llama", 4)
    one, two = (save_adapter(tmp_path / name, base, seed) for seed, name in enumerate(("one", "two")))

    turns = set()

    def ask(adapter: str | None) -> tuple[list[int], int]:
        wanted = greedy(stock_model(base, adapter), PROMPT, 12)[0]
        with LLM(base, adapter=adapter, disk_cache=str(tmp_path / "disk"), disk_limit="100MB", **SETTINGS) as llm:
            done = llm.generate(PROMPT, 12, ignore_eos=True)
            assert llm.turns_file is not None
            turns.add(llm.turns_file._path)
        assert list(done.tokens) == wanted
        return wanted, done.cached_tokens

    found = [ask(adapter) for adapter in (None, one, two)]
    assert len({tuple(tokens) for tokens, _ in found}) == 3 and [cached for _, cached in found] == [0, 0, 0]
    again = [ask(adapter) for adapter in (None, one, two)]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found]
    assert [cached for _, cached in again] == [32, 32, 32]
    save_adapter(Path(one), base, 7)
    changed, cached = ask(one)
    assert cached == 0 and changed != found[1][0]
    save_adapter(Path(one), base, 0)
    assert ask(one) == (found[1][0], 32), "as it was, it has its blocks again"
    assert len(turns) == 4, "remembered turns, too"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_gguf_file_whose_rows_are_in_another_order(tmp_path: Path, kind: str) -> None:
    """Adapters are for the order of the original."""
    spec = gguf_files.Spec()
    held = gguf_files.write(tmp_path / "model.gguf", spec)
    config = gguf_files.config(spec)
    original = llama.Model(llama.ModelArgs.from_dict(config))
    original.load_weights([(name, mx.array(array)) for name, array in held.items()])
    (tmp_path / "original").mkdir()
    save_folder(tmp_path / "original", original)
    save_config(config, tmp_path / "original" / "config.json")
    adapter = save_adapter(tmp_path / "adapter", str(tmp_path / "original"), 1, kind)
    stock = stock_model(str(tmp_path / "original"), adapter)
    x = mx.array([PROMPT])
    adapted = load_model(str(tmp_path / "model.gguf"), adapter=adapter, packed=True).model
    assert mx.abs(stock(x) - original(x)).max() > 0.1 and mx.abs(adapted(x) - stock(x)).max() < 1e-4


def test_a_draft_model_beside_an_adapter(folder: Path) -> None:
    base = save_model(folder, "llama")
    adapter = save_adapter(folder / "drafted", base, 5)
    wanted, _ = greedy(stock_model(base, adapter), PROMPT, 12)
    with LLM(base, adapter=adapter, draft_model=base, **SETTINGS) as llm:
        assert generated(llm) == wanted


def config_of(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("folder", SettingError, "--adapter is .*, which is not a folder"),
        ("config", ModelFormatError, "--adapter is .* has no adapter_config.json"),
        ("weights", ModelFormatError, "--adapter is .* has no adapters.safetensors"),
        ("peft", ModelFormatError, "has no adapters.safetensors; it is a PEFT adapter"),
        ("truncated", ModelFormatError, "adapters.safetensors is truncated"),
        ("damaged", ModelFormatError, "adapter_config.json is damaged"),
        ("full", ModelFormatError, "fine_tune_type is 'full'.*mlx_lm.fuse"),
        ("kind", ModelFormatError, "fine_tune_type is 'ia3'; OneKV supports lora and dora"),
        ("scale", ModelFormatError, "scale in lora_parameters is None"),
        ("rank", ModelFormatError, "rank in lora_parameters is 0"),
        ("shape", ModelFormatError, r"q_proj.lora_a is 64 x 4, but must be 64 x 5 here with rank 5"),
        ("other", ModelFormatError, r"for another model: it adapts model.layers.1.other, which llama does not have"),
        ("norm", ModelFormatError, "adapts model.norm; a RMSNorm cannot be adapted by lora"),
        ("half", ModelFormatError, "has no model.layers.1.self_attn.q_proj.lora_b, which lora needs"),
        ("stray", ModelFormatError, "has model.layers.1.self_attn.q_proj.weight, which does not belong to an adapter"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said(
    folder: Path, tmp_path: Path, change: str, error: type[OneKVError], said: str
) -> None:
    base, path = save_model(folder, "llama"), tmp_path / "adapter"
    save_adapter(path, base, 1, layers=1, keys=["self_attn.q_proj"])
    file, config = path / "adapters.safetensors", config_of(str(path))
    tensors: Any = mx.load(str(file))
    name = next(iter(tensors)).rpartition(".")[0]
    renamed = {"other": "model.layers.1.other", "norm": "model.norm"}
    if change == "folder":
        shutil.rmtree(path)
    elif change == "config":
        (path / "adapter_config.json").unlink()
    elif change in ("weights", "peft"):
        file.rename(path / "adapter_model.safetensors" if change == "peft" else tmp_path / "elsewhere")
    elif change == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    elif change == "damaged":
        (path / "adapter_config.json").write_text("{")
    elif change in ("full", "kind"):
        config["fine_tune_type"] = "full" if change == "full" else "ia3"
    elif change == "scale":
        config["lora_parameters"]["alpha"] = config["lora_parameters"].pop("scale")
    elif change in ("rank", "shape"):
        config["lora_parameters"]["rank"] = 0 if change == "rank" else 5
    elif change == "half":
        mx.save_safetensors(str(file), {f"{name}.lora_a": tensors[f"{name}.lora_a"]})
    elif change == "stray":
        mx.save_safetensors(str(file), {**tensors, f"{name}.weight": mx.zeros((2, 2))})
    else:
        changed = {f"{renamed[change]}.{key.rpartition('.')[2]}": value for key, value in tensors.items()}
        mx.save_safetensors(str(file), changed)
    if change in ("full", "kind", "scale", "rank", "shape"):
        (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=said):
        LLM(base, adapter=str(path), **SETTINGS)


def test_an_adapter_for_a_model_of_another_size(folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", save_model(folder, "llama"), 1)
    with pytest.raises(ModelFormatError, match=r"for another model: .* is \d+ x 4, but must be \d+ x 4 here"):
        LLM(DEFAULT_MODEL, adapter=adapter, **SETTINGS)


def test_a_model_object_gets_its_adapter_from_mlx_lm() -> None:
    with pytest.raises(SettingError, match="the model is an object"):
        LLM(build("llama"), adapter="anywhere", **SETTINGS)


def test_a_layer_with_a_way_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    base = save_model(folder, "afm7")
    path = save_adapter(tmp_path / "adapter", base, 1, keys=["self_attn.qkv_proj"])
    file = str(Path(path) / "adapters.safetensors")
    tensors: Any = mx.load(file)
    layer = next(iter(tensors)).partition(".lora_a")[0].partition(".lora_b")[0]
    mx.save_safetensors(file, {f"{layer}.lora_a": mx.ones((4, 4)), f"{layer}.lora_b": mx.ones((4, 4))})
    with pytest.raises(ModelFormatError, match="a FusedLinear cannot be adapted by lora"):
        LLM(base, adapter=path, **SETTINGS)


def test_dora_of_experts_is_refused(folder: Path, tmp_path: Path) -> None:
    base = save_model(folder, "qwen3_moe")
    path = save_adapter(tmp_path / "adapter", base, 1, keys=["mlp.switch_mlp.up_proj"])
    (Path(path) / "adapter_config.json").write_text(json.dumps({**config_of(path), "fine_tune_type": "dora"}))
    file = str(Path(path) / "adapters.safetensors")
    tensors: Any = mx.load(file)
    layers = {name.rpartition(".")[0] for name in tensors}
    mx.save_safetensors(file, {**tensors, **{f"{layer}.m": mx.ones(4) for layer in layers}})
    with pytest.raises(ModelFormatError, match="SwitchLinear cannot be adapted by dora"):
        LLM(base, adapter=path, **SETTINGS)
