"""Which tokens are where: finished and running sequences leave their blocks in an index, later ones start from them.

- `Index` (index.py) owns the nodes: one per block of tokens, in a tree, found by chained hash. It knows no arrays.
- `restore_point` (restore.py) says how much of a match a sequence can continue from: one pure function.
- `PrefixCache` (cache.py) owns the cache's hold on blocks and the recurrent snapshots; it opens sequences on what is
  cached, publishes what they compute, and evicts by use.
"""
