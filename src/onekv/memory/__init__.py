"""The KV bytes of all sequences, each held once, in arrays that are allocated at start and never move.

Who owns what:

- `Layout` (layout/) says what a model keeps per token: read from the model, immutable.
- `Plan` (plan/) says how many blocks the budget buys and whether all of it fits the device: immutable.
- `Pool` (pool/pool.py), one per group, owns the arrays and knows who holds each block.
- `Table` (pool/table.py) owns references to blocks of one pool for one sequence.
- `Sequence` (pool/sequence.py) owns one table per group and its recurrent states.
- `Step` (step.py) lives for one forward pass: which sequences, where their new tokens go, what they read.
- a codec (formats/) says how rows are stored; it owns nothing.
- `LayerKV` (attention/layer.py) writes and reads one layer's arrays, whose single reference it has; backends
  (attention/) compute attention over them.
- the layers (layers.py) speak mlx-lm's cache protocol; they hold no tokens.
- `KVMemory` (kv.py) ties them together for one model.

Units: positions and lengths are tokens, `blocks` are counts or ids of blocks, everything named bytes is bytes.
"""

from ..models.limits import import_mlx_lm

# Before the modules here import it.
import_mlx_lm()
