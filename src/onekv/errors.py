"""Every error a user can meet, as a type with a message for a person.

A message says what is wrong with which value, and which flag or action changes it. The command line prints the
message alone; a traceback that reaches a user is a bug.
"""


class OneKVError(Exception):
    """The base of all errors OneKV raises on purpose."""


class SettingError(OneKVError):
    """A setting has a value that cannot be used."""


class InstallError(OneKVError, ImportError):
    """A part that this machine needs is not installed, or cannot be loaded."""


class ModelNotFoundError(OneKVError):
    """No model by that name, folder or file."""


class ModelFormatError(OneKVError):
    """The model's files are damaged or of a kind that is not supported."""


class UnsupportedLayerError(OneKVError):
    """A layer of the model keeps state in a way OneKV cannot hold."""


class FetchError(OneKVError):
    """A model could not be fetched: network, disk space or checksum."""


class MemoryBudgetError(OneKVError):
    """The plan does not fit the device, or a request can never fit the KV budget."""


class PromptError(OneKVError):
    """The prompt is empty, too long, or has tokens the model does not know."""


class TooLongError(MemoryBudgetError):
    """A request is longer than the model's context or the whole KV pool."""


class OverloadedError(OneKVError):
    """Too many requests wait, or one has waited too long; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailedError(OneKVError):
    """One request could not be finished: bad logits, a tokenizer or a model that raised."""

    @classmethod
    def internal(cls, cause: Exception) -> "RequestFailedError":
        """For an error that is not the client's, which is told no more than that; the log has the details."""
        error = cls("an internal error ended this request; the log has the details")
        error.__cause__ = cause
        return error
