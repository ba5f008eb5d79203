"""Attention over plain blocks as Metal kernels.

These have never run on Metal. They have been compiled and tested as CUDA and as C++; on Metal, a trial at load decides
whether they are used (trial.py). The bodies are written once, in what Metal's language and CUDA have in common:

lanes.metal, lanes.cu   each language's names for lanes, shuffles, shared memory and barriers
rows.metal              loading rows, summing over lanes
attend.metal            computes the parts of all pieces of work
join.metal              joins the parts of each row
store.metal             stores new tokens first, where rows read each other's
"""
