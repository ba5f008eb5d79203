"""Side-by-side measurements against peers: same process, same weights, rounds interleaved, medians of ratios."""
