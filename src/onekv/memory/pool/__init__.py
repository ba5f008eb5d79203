"""Who holds which block: pool.py owns a group's arrays, table.py the blocks of one sequence in one group, sequence.py
one table per group; blocks.py copies whole blocks out and in.
"""

from .pool import IntegrityError, LayerArrays, OutOfBlocks, Pool

__all__ = ["IntegrityError", "LayerArrays", "OutOfBlocks", "Pool"]
