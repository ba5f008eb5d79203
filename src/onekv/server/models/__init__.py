"""Several models behind one server, in one memory budget.

    settings.py   `--memory` and `--keep`
    spec.py       the models: names and settings of each, from the command line and [models.NAME] tables
    planning.py   how much memory a model needs, known before its weights are loaded
    weights.py    weights shared by a base and its adapters, in memory once
    loading.py    creates the `Backend` of a model
    freeing.py    returns freed memory to the system
    progress.py   progress of loads and unloads, and estimates of their duration
    model.py      one model: its state, and the requests that use it
    registry.py   `Models`: which are loaded; the thread that loads and unloads
    refusals.py   errors for requests that get no model
    choose.py     finds the model that a request names; the request holds it until it is answered
    early.py      events of a stream while its request waits for a model
    describe.py   descriptions of models for /v1/models, /health and /admin/models
    figures.py    /metrics of all models

`Models` owns all of them, and one `Backend` for each that is loaded: created when it is loaded, dropped when it is
unloaded. A server with a single model and no `--memory` has no `Models`: its `Backend` exists from start to end.

    unloaded -> loading -> loaded -> unloading -> unloaded
                   \\-> failed -> loading                      failed keeps the reason; the next request tries again

`loading`     its bytes are counted from here on; requests for it wait
`loaded`      requests for it get its backend at once, and hold it until they are answered
`unloading`   no new request gets it; when those that hold it are answered, its engine is stopped, blocks in memory are
              written to the disk cache, and pool and weights are freed. Its bytes are counted until that is done

A base and its adapters are separate models, each with an engine, a pool and a state. The weights that they share are
counted once, from the start of the first load until the last of them is unloaded, in whatever order that happens. If
two of them never fit together, the weights stay, and are counted, while one makes room for the other.

One thread (onekv-models) loads and unloads, one model at a time, so the bytes counted never exceed `--memory`. Requests
for models that are not loaded wait in one queue in order of arrival; the model of the first is loaded next. If there is
no room for it, others are unloaded: first the least recently used that no request holds, then those that are held,
which get no new requests until it is loaded, so that no request waits forever. Pinned models are never unloaded, and a
model that does not fit in addition to them is rejected at once. `Model.keep` determines how long a model stays; it
starts as configured, and pinning a model at run time changes only that.
"""
