"""Storage for blocks that do not fit in the pool, so that they can be read back instead of being recomputed.

base.py        what a tier is: the contract               Tier, Address, Entry, Target, TierStats
staging.py     buffers on their way out, for any tier     Staging
opening.py     from settings to a disk tier

disk.py        the disk tier: the contract, built on      DiskTier
writer.py      the thread that changes the folder         Writer; tasks.py: what it does
reader.py      the threads that read                      Readers, with their tasks
shared.py      what these threads share                   Setup, Shared
opened.py      what the tiers of several models share     OpenFolder: turns, counts, fair shares
limited.py     the folder within its limit                LimitedStore
store.py       files and rows, changed in order           Store
index.py       which parts there are (SQLite)             DiskIndex; rows.py: its rows; schema.py: its tables
folder.py      names, lock, and what is ours              Folder; image.py: what a file looks like
files.py       calls to the system                        Files, Clock
maintain.py    `onekv cache`: inspect, verify, clear

remote/        the remote tier: a store that several servers share       RemoteTier
"""
