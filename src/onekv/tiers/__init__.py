"""Where blocks live when the pool has no room for them. `base` is the contract, `disk` the one tier there is."""
