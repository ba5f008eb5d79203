"""What a model's files say of it."""

import os

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama
from mlx_lm.utils import save_config, save_model

from onekv.models.facts import model_facts

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
# Embedding, two layers of attention (q, k, v, o), MLP and norms, the last norm.
PARAMETERS = 96 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64


def save(folder, bits=None):
    model, config = llama.Model(llama.ModelArgs.from_dict(CONFIG)), dict(CONFIG)
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(exist_ok=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")


def test_parameters_are_counted_whether_or_not_they_are_packed(tmp_path):
    for name, bits, stored in (("plain", None, "BF16"), ("packed", 4, "4-bit")):
        save(tmp_path / name, bits)
        facts = model_facts(tmp_path / name)
        assert (facts.parameters, facts.quantization, facts.format) == (PARAMETERS, stored, "safetensors"), name
        assert facts.bytes == (tmp_path / name / "model.safetensors").stat().st_size


def test_other_files_have_another_digest(tmp_path):
    save(tmp_path / "model")
    first = model_facts(tmp_path / "model").digest
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    model_facts.cache_clear()
    assert model_facts(tmp_path / "model").digest != first


def test_a_gguf_file(smollm2_path):
    facts = model_facts(smollm2_path)
    assert (facts.format, facts.parameters, facts.bytes) == ("gguf", 134_515_008, smollm2_path.stat().st_size)
