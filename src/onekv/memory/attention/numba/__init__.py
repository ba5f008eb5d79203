"""Attention over encoded blocks on CPU, compiled by numba."""
