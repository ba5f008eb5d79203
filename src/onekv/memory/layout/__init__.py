"""What a model keeps per token: types.py says it, reader.py reads it from the model, stored.py gives it a format,
calibration.py finds the centres of keys that a format may want, and fingerprint.py names what decides the stored bytes.
"""

from .types import Group, KVLayer, Layout, Leaf, Rule, StateLayer

__all__ = ["Group", "KVLayer", "Layout", "Leaf", "Rule", "StateLayer"]
