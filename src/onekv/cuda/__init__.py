"""CUDA kernels: what all of them are made of (source.py, mma.cu), and products of few rows (products.py, product.cu).

Those of attention are where attention is.
"""
