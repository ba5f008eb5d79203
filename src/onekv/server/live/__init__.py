"""Live state for watchers: the page, `onekv top`, and any other reader of GET /admin/live.

    EngineThread.look() -> Snapshots: plain figures of all models -> Feed: encoded once, sent to all who watch

The engine's thread takes its snapshot between two steps, at most every 250 ms; everything else happens in the event
loop. Nothing happens while nobody is watching. A snapshot is complete, so a reader that missed some is up to date with
the next. It has figures and never the text of a prompt or an answer: that belongs to the key that sent it.
"""
