"""A seeded simulation of the whole engine, in which any wrong byte changes an answer.

Real: the engine's thread (its loop, driven by hand), scheduler, pools, tables, prefix index, eviction, snapshots and
the disk tier with its files and SQLite index. Simulated: time, the operating system's file API, and the model: the KV
row it stores for a token is a hash of all tokens up to it, and its next token is a hash of all rows that it reads. So a
block that is stale, half written, misplaced or from another conversation changes what it reads.

    truth    the hashes, and the answer of a model without any cache
    model    the same model over the real pool: writes and reads where the real tables say, and checks what it reads
    faults   what can go wrong: exceptions, bit flips, full disks, torn writes, kills, damaged files and indexes
    world    one engine on one folder, its clients, and what must hold after every step
    script   a list of operations generated from a seed; runs it, and minimizes it if it fails
    coverage what was reached, and how often
    command  `onekv sim`

An operation's numbers are valid in every state (they are taken modulo the number of choices), so a script stays valid
when operations are removed, and the same script always gives the same run.
"""
