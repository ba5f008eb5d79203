"""What there is, live, for who watches: the page, `onekv top`, and whoever reads GET /admin/live.

    EngineThread.look() -> Snapshots: plain figures of all models -> Feed: encoded once, sent to all who watch

The engine's thread makes its picture between two steps, at most every 250 ms; everything else happens in the event
loop. Nothing is made while nobody watches. A snapshot is complete, so who misses some is right again with the next.
It has figures and never text of a prompt or an answer: that belongs to the key that sent it.
"""
