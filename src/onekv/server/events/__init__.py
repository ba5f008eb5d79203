"""Events for routers: which blocks of tokens this server has cached, in the format of vLLM's KV events.

wire.py        events of the prefix index as the messages that routers read; no sockets
publisher.py   one model's stream: sockets, sequence numbers, replay    Publisher
opening.py     from settings to a publisher for each model
figures.py     what a publisher did, as metrics

    engine's thread    Index.listener -> Unsent.add           (prefix/events.py) never waits
    onekv-events       Unsent.take -> PUB: topic, sequence number, batch
                       ROUTER: what a subscriber missed, or all there is

A publisher belongs to a model, not to its backend: a model that is unloaded and reloaded continues the same stream. The
thread also applies what it has sent to its own copy, so that it can report the complete state after a sequence number
without asking the engine.
"""
