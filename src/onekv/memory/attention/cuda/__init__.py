"""Attention over plain and encoded blocks as CUDA kernels."""
