"""All checks, in the order in which they run: the clock's is the last, because it compares with the start."""

from . import choices, disk, exactness, flat, machine, model, serving

CHECKS = [
    machine.CHECK,
    exactness.CHECK,
    flat.CHECK,
    choices.CHECK,
    disk.CHECK,
    serving.CHECK,
    model.CHECK,
    machine.CLOCK,
]
