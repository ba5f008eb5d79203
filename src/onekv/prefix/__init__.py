"""The prefix cache: finished and running sequences leave their blocks in an index, and later ones start from them.

find.py        where a prompt can continue: in RAM, and in the colder tiers       Finder -> Found
lease.py       one sequence's hold on memory, from what it shares to what it leaves behind    Lease
index.py       the tree of nodes, one per block of tokens, found by chained hash; it knows no arrays    Index
events.py      changes to it, for copies of it elsewhere    Stored, Removed, Cleared, Unsent
store.py       the cache's hold on blocks and snapshots, and eviction    Store
offload.py     writes to the colder tiers    Offload
loading.py     reads from them    Loader
restore.py     how much of a path a sequence can continue from: one pure function
cache.py       the entry point: opens leases; pins, clearing, figures    PrefixCache
"""
