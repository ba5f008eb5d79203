"""`onekv doctor`: is OneKV exact, flat and fast on this machine?

    base.py        the contract of a check: `Case`, `Notes`, `Check`, `Result`, and `switch`
    running.py     runs checks one after another; what one raises is its failure
    report.py      the table, the verdict in words, JSON; scrub.py: without secrets

    machine.py     device, versions, memory, limits, the clock (system.py asks the operating system)
    exactness.py   backends, formats and compiled steps beside MLX's own operations (trial.py, reference.py, bounds.py)
    flat.py        writes in place; a hit copies nothing
    choices.py     donation, overlap, compile: what is chosen at load, and what was measured
    disk.py        the disk cache's folder, speed, a conversation there and back
    serving.py     a server process and two clients
    model.py       a real model: fits, exact, fast

    models.py      small random models of every kind of layer; engines.py: engines over them

To add a check: write a module with a `CHECK` and put it into `checks`, and a planted fault into tests/test_doctor.py.
Nothing is downloaded unless a model is named.
"""
