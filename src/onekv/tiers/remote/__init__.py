"""The remote tier: parts in a store that several servers share, such as Valkey, an object store or a shared folder.

    engine's thread   asks and is answered from what threads have found out; fills buffers; takes what has come
    lookers           ask the store which parts there are (`lookups`)
    fetchers          fetch parts that are expected and check them, several at once (`fetches`)
    writer            seals parts and puts them, at a limited rate (`writes`)
    keeper            asks a paused store whether it works again, and measures it (`tier`)

    url.py       --remote-tier: what it may say
    stores.py    what is asked of a store: Store; valkey.py and objects.py do it
    seal.py      a part as the store has it: the file of the disk tier and a seal, and its name
    health.py    pauses (Breaker), and what reading and computing are expected to take (Pace)
    common.py    what the threads share
    tier.py      the contract, by means of all these     RemoteTier
    opening.py   from settings to a tier

What belongs to whom:

    a part there       the store's: it may evict it whenever it likes. It is put if absent and never changed; one that
                       does not match its seal is removed
    on its way out     a buffer of `Staging`: the engine's thread fills it, the writer seals it, puts it, gives it back
    on its way in      a `Fetch`: queued -> running (a fetcher's) -> here (checked; the engine's thread copies it to the
                       pool) or failed. Those that run or are here are within a budget of bytes

    up -> paused (something failed, or took too long) -> up (the keeper's probe was answered in time)

Paused, the tier has nothing and takes nothing: all that waits for it gets its answer at once, and is computed. A store
that only refuses to be written to is still read; it is written to again after a while. Nothing the store says is
believed: an address that it names is compared with the one that is wanted, content with its seal.

For a simulation, `Setup(threads=False, clock=...)` is the same tier, driven from outside: a thread's next step is a
task, done when `RemoteTier.work` is called.

One lock (`Common.lock`) guards all that threads share. Nobody talks to the store, checks content or copies it while it
is held.
"""
