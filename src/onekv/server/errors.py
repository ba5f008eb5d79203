"""What went wrong, as a status and a body in each API's own format."""

import logging
from typing import Any

from ..errors import (
    MemoryBudgetError,
    OneKVError,
    OverloadedError,
    PromptError,
    RequestFailedError,
    SettingError,
    TooLongError,
)
from .journal import new_id, request_id

log = logging.getLogger("onekv.server")


class BadRequestError(OneKVError):
    """The body is wrong; `field` says where, as a path like messages.0.content."""

    status = 400

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnauthorizedError(OneKVError):
    status = 401


class ForbiddenError(OneKVError):
    """The key is known, but it is not the administrator's; or a web page calls that may not."""

    status = 403


class NotFoundError(OneKVError):
    """No such model, response or path."""

    status = 404


class TooLargeError(OneKVError):
    """The body has more bytes or is nested deeper than is read."""

    status = 413


class LoadingError(OneKVError):
    """The model is still being loaded."""

    status = 503


class MisdirectedError(OneKVError):
    """The server was addressed by a name that is not its own."""

    status = 421


class FormError(RequestFailedError):
    """The constraint on the answer could not be satisfied, found out in the middle of it."""

    status = 400


class ContextLengthError(TooLongError):
    """Prompt and answer can never fit. Agents shorten their conversation when they read the wording of the API that
    they know, so each API gets its own.
    """

    def __init__(self, prompt: int, wanted: int | None, longest: int, hint: str) -> None:
        """`wanted` is what the client itself gave as max_tokens; `hint` says what sets the limit."""
        asked = f"your messages resulted in {prompt} tokens"
        if wanted is not None:
            counted = f"{prompt} in the messages, {wanted} in the completion"
            asked = f"you requested {prompt + wanted} tokens ({counted})"
        super().__init__(
            f"This model's maximum context length is {longest} tokens. However, {asked}. "
            f"Please reduce the length of the messages or completion. {hint}"
        )
        given = f" (max_tokens is {wanted})" if wanted is not None else ""
        self.anthropic = f"prompt is too long: {prompt} tokens > {longest} maximum{given}. {hint}"


_Refusal = (
    BadRequestError
    | UnauthorizedError
    | ForbiddenError
    | NotFoundError
    | TooLargeError
    | LoadingError
    | MisdirectedError
    | FormError
)


def status_of(error: OneKVError) -> int:
    if isinstance(error, _Refusal):
        return error.status
    if isinstance(error, PromptError | SettingError | TooLongError):
        return 400
    if isinstance(error, OverloadedError):
        return 429
    if isinstance(error, MemoryBudgetError):
        return 503
    return 500


def for_client(error: Exception) -> OneKVError:
    """`error` as a client may see it: what was not raised on purpose stays in the log, under an id that both have."""
    if isinstance(error, OneKVError):
        return error
    known_as = request_id() or new_id()
    log.error("request %s failed", known_as, exc_info=error)
    return RequestFailedError(f"internal error; in the server's log, look for {known_as}")


def headers_of(error: OneKVError) -> dict[str, str]:
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, MemoryBudgetError) and not isinstance(error, TooLongError):
        return {"Retry-After": "10"}
    if isinstance(error, LoadingError):
        return {"Retry-After": "5"}
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    500: "api_error",
}


def openai_body(error: OneKVError) -> dict[str, Any]:
    status = status_of(error)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "not_found" if isinstance(error, NotFoundError) else None
    if isinstance(error, TooLongError):
        code = "context_length_exceeded"
    field = error.field if isinstance(error, BadRequestError) else None
    return {"error": {"message": _naming(field, str(error)), "type": kind, "param": field, "code": code}}


def ollama_body(error: OneKVError) -> dict[str, Any]:
    field = error.field if isinstance(error, BadRequestError) else None
    return {"error": f"{field}: {error}" if field else str(error)}


def anthropic_body(error: OneKVError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status_of(error), "invalid_request_error")
    field = error.field if isinstance(error, BadRequestError) else None
    message = error.anthropic if isinstance(error, ContextLengthError) else _naming(field, str(error))
    known_as = {"request_id": request_id()} if request_id() is not None else {}
    return {"type": "error", "error": {"type": kind, "message": message}, **known_as}


def _naming(field: str | None, message: str) -> str:
    """`message` with the field at its front: many clients show the message and nothing else."""
    return f"{field}: {message}" if field is not None and not message.startswith(field) else message
