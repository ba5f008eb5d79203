"""A seeded simulation of the whole engine, in which any wrong byte changes an answer.

Real are the engine's thread (its loop, run by hand), scheduler, pools, tables, prefix index, eviction, snapshots and
the disk tier with its files and SQLite index. Made up are time, the operating system's answers about files, and the
model: the KV row it stores for a token is a hash of all tokens up to it, and its next token is a hash of all rows that
it reads. So a block that is stale, foreign, half written or in the wrong place shows in what it reads.

    truth    the hashes, and the answer of a model without any cache
    model    the same model over the real pool: writes and reads where the real tables say, and checks what it reads
    faults   what can go wrong: exceptions, bit flips, full disks, torn writes, kills, damaged files and indexes
    world    one engine on one folder, its clients, and what must hold after every step
    script   a list of operations made from a seed; running it, and making it shorter while it still fails
    coverage what was reached, and how often
    command  `onekv sim`

An operation's numbers mean something in every state (they are taken modulo what there is), so a script stays valid
when operations are taken out of it, and the same script always gives the same run.
"""
