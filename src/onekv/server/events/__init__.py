"""Events for routers: which blocks of tokens this server has cached, in the format of vLLM's KV events.

wire.py        events of the prefix index as the messages that routers read; no sockets
publisher.py   one model's stream: sockets, sequence numbers, replay    Publisher
opening.py     from settings to a publisher for each model
figures.py     what a publisher did, as metrics

    engine's thread    Index.listener -> Unsent.add           (prefix/events.py) never waits
    onekv-events       Unsent.take -> PUB: topic, sequence number, batch
                       ROUTER: what a subscriber missed, or all there is

A publisher belongs to a model, not to its backend: a model that is unloaded and loaded again continues in the same
stream. What the thread has sent it also applies to a copy of its own, so that it can tell everything that is true after
a sequence number without asking the engine.
"""
