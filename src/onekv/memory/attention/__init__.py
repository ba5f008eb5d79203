"""Attention over the pool: how a model's calls reach it (hook.py), what a step reads as index arrays (pairs.py,
turns.py), and what computes it: MLX's operations over plain (paged.py) and encoded blocks (tiles.py), CUDA kernels
(cuda/), and compiled loops on CPU (numba/).
"""
