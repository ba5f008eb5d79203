"""`onekv bench all`: the same scenarios for every contender, each a server in a process of its own.

    contenders.py   the contenders, and how their servers are started
    others.py       servers of other projects, if they are installed
    watched.py      runs in the contender's process: MLX's allocations over time
    timeline.py     memory of a server's process over time, and its peaks in each phase
    session.py      one contender in one scenario
    scenarios.py    what clients do, and what is measured
    limits.py       hardware limits for OneKV's figures: memory bandwidth, speed of the disk
    measure.py      rounds, interleaved; figures and their medians
    report.py       tables, sentences, Markdown and HTML
    plots.py        bars and timelines as SVG, in light and dark

All scenarios talk HTTP, as clients do, so that any server that speaks OpenAI's API can take part. A scenario gets a
`Session`: a fresh server of one contender, with nothing cached. Two servers never run at the same time.
"""
