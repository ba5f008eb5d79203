"""Every error that a user can encounter, as a type with a message for a person.

A message says what is wrong with which value, and which flag or action changes it. The command line prints the
message alone; a traceback that reaches a user is a bug.
"""


class OneKVError(Exception):
    """Base class of all errors that OneKV raises deliberately."""


class SettingError(OneKVError):
    """A setting has an invalid value."""


class InstallError(OneKVError, ImportError):
    """A required package is not installed, or cannot be loaded."""


class ModelNotFoundError(OneKVError):
    """No model by that name, folder or file."""


class ModelFormatError(OneKVError):
    """The model's files are corrupt or of an unsupported kind."""


class UnsupportedLayerError(OneKVError):
    """A layer of the model keeps its state in a way that OneKV does not support."""


class FetchError(OneKVError):
    """A model could not be downloaded: network, disk space or checksum."""


class MemoryBudgetError(OneKVError):
    """The plan does not fit the device, or a request can never fit the KV budget."""


class PromptError(OneKVError):
    """The prompt is empty, too long, or has tokens the model does not know."""


class TooLongError(MemoryBudgetError):
    """A request is longer than the model's context or the whole KV pool."""


class OverloadedError(OneKVError):
    """The queue is full, or a request has waited too long; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StuckError(OneKVError):
    """A step of the engine does not finish."""


class ParallelError(OneKVError):
    """The processes that share a model (ranks) cannot find each other, or do not agree."""


class RequestFailedError(OneKVError):
    """One request could not be completed: bad logits, or the tokenizer or model raised."""

    @classmethod
    def internal(cls, cause: Exception) -> "RequestFailedError":
        """For an error that is not the client's: the client learns nothing more, the log has the details."""
        error = cls("an internal error ended this request; the log has the details")
        error.__cause__ = cause
        return error
