"""Several models behind one server, in one number of bytes.

    settings.py   `--memory` and `--keep`
    spec.py       which models there are: names, settings of each, from the command line and [models.NAME] tables
    planning.py   what a model needs, known before its weights are loaded
    weights.py    a base and its adapters have the same weights, which are in memory once
    loading.py    from a model to the `Backend` that answers for it
    freeing.py    what was freed goes back to the system
    progress.py   how far a load or an unload is, and how long it will take
    model.py      one model: its state, and who uses it
    registry.py   `Models`: which are loaded; the thread that loads and unloads
    refusals.py   what a request is told that gets none
    choose.py     from a request to the model that it names; the request holds it until it is answered
    early.py      what a stream says while its request waits for a model
    describe.py   what /v1/models, /health and /admin/models say of them
    figures.py    /metrics of all of them

`Models` owns all of them, and one `Backend` for each that is loaded: made when it is loaded, dropped when it is
unloaded. A server that has one model and no `--memory` has no `Models`: its `Backend` is there from start to end.

    unloaded -> loading -> loaded -> unloading -> unloaded
                   \\-> failed -> loading                      failed keeps the reason; the next request tries again

`loading`     its bytes are counted from here on; requests for it wait
`loaded`      requests for it get its backend at once, and hold it until they are answered
`unloading`   no new request gets it; when those that hold it are answered its engine is stopped, hot blocks go to the
              disk cache, pool and weights are given back. Its bytes are counted until that is done

A base and its adapters are models of their own, each with an engine, a pool and a state. The weights that they share
are counted once, from when the first of them is loading until the last is unloaded, in whatever order that is. Where
two of them never fit together, the weights stay, and are counted, while one makes room for the other.

One thread (onekv-models) loads and unloads, one model at a time, so the bytes that are counted are never more than
`--memory`. Requests for models that are not loaded wait in one queue in the order they came; the model of the first is
the next to be loaded. Where there is no room for it, others have to go: the least recently used that nobody holds
first, then those that are held, which get no new requests until it is loaded, so that nobody waits for ever. What is
pinned never has to go, and a model that does not fit beside what is pinned is refused at once. How long a model stays
is `Model.keep`, which starts as it was configured; pinning one at run time changes that and nothing else.
"""
