"""How many bytes of weights this process has read so far, to show the progress of a load."""


class _Read:
    """A count that only grows; any thread may look at it."""

    bytes = 0


read = _Read()
