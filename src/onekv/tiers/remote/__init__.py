"""The remote tier: parts in a store that several servers share, such as Valkey, an object store or a shared folder.

    engine's thread   gets answers from what threads have found out; fills buffers; takes what has arrived
    lookers           ask the store which parts it has (`lookups`)
    fetchers          fetch expected parts and verify them, several at once (`fetches`)
    writer            seals parts and puts them, at a limited rate (`writes`)
    keeper            probes a paused store, and measures it (`tier`)

    url.py       parses --remote-tier
    stores.py    the interface of a store: Store; implemented by valkey.py and objects.py
    seal.py      a part as the store has it: the file of the disk tier and a seal, and its name
    health.py    pauses (Breaker), and what reading and computing are expected to take (Pace)
    common.py    what the threads share
    tier.py      the contract, built on all of these     RemoteTier
    opening.py   from settings to a tier

Ownership:

    a stored part      the store's: it may evict it at any time. It is put if absent and never changed; one that does
                       not match its seal is removed
    on its way out     a buffer of `Staging`: the engine's thread fills it, the writer seals, puts and returns it
    on its way in      a `Fetch`: queued -> running (a fetcher's) -> here (verified; the engine's thread copies it to
                       the pool) or failed. Those running or here are within a budget of bytes

    up -> paused (something failed, or took too long) -> up (the keeper's probe was answered in time)

While paused, the tier has nothing and accepts nothing: everything that waits for it is answered at once, and prompts
are computed. A store that only rejects writes is still read; writes are retried after a while. Nothing the store
returns is trusted: addresses are compared with the wanted ones, content with its seal.

For a simulation, `Setup(threads=False, clock=...)` is the same tier, driven from outside: a thread's next step is a
task, run when `RemoteTier.work` is called.

One lock (`Common.lock`) guards everything that threads share. It is never held while talking to the store, or while
verifying or copying content.
"""
