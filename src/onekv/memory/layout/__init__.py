"""What a model keeps per token: types.py describes it, reader.py reads it from the model, stored.py assigns formats,
calibration.py finds the centres of keys that a format may need, and fingerprint.py names what determines the stored
bytes.
"""

from .types import Group, KVLayer, Layout, Leaf, Rule, StateLayer

__all__ = ["Group", "KVLayer", "Layout", "Leaf", "Rule", "StateLayer"]
