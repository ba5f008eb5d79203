"""LoRA adapters made by mlx-lm's own tuner, and stock mlx-lm with them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

RANK, SCALE = 4, 8.0


def save_adapter(
    folder: Path,
    model: str,
    seed: int,
    kind: str = "lora",
    rank: int = RANK,
    scale: float = SCALE,
    layers: int = -1,
    keys: list[str] | None = None,
) -> str:
    """An adapter with random weights for the model in the folder `model`.

    `layers` are the last so many that it adapts, and `keys` which layers of each; all, if they are not given.
    """
    stock = stock_model(model)
    stock.freeze()
    mx.random.seed(seed)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.05, **({"keys": keys} if keys else {})}
    linear_to_lora_layers(stock, layers, parameters, use_dora=kind == "dora")

    def noise(path: str, value: mx.array) -> mx.array:
        # What is trained starts as no change at all.
        size = 0.02 if path.endswith("lora_b") else 0.2
        return value + size * mx.random.normal(value.shape)

    stock.update(tree_map_with_path(noise, stock.trainable_parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(stock.trainable_parameters())))
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def stock_model(model: str, adapter: str | None = None) -> Any:
    """As `mlx_lm.load` has it, without the tokenizer."""
    stock = load_model(Path(model))[0]
    if adapter is not None:
        load_adapters(stock, adapter)
        stock.eval()
    return stock


def greedy(model: Any, tokens: list[int], count: int) -> tuple[list[int], mx.array]:
    """The next tokens by stock mlx-lm without any cache, and the logits they are from."""
    made, logits = list(tokens), []
    for _ in range(count):
        logits.append(model(mx.array(made)[None])[0, -1].astype(mx.float32))
        made.append(int(mx.argmax(logits[-1])))
    return made[len(tokens) :], mx.stack(logits)
