"""CUDA kernels: shared building blocks (source.py, mma.cu), and matrix products with few rows (products.py,
product.cu).

Attention kernels are in `memory/attention/cuda`.
"""
