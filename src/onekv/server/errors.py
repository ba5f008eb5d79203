"""What went wrong, as a status and a body in each API's own format."""

import logging
import secrets
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
    """The key is known, but it is not the administrator's."""

    status = 403


class NotFoundError(OneKVError):
    """No such model, response or path."""

    status = 404


class TooLargeError(OneKVError):
    """The body has more bytes or is nested deeper than is read."""

    status = 413


class MisdirectedError(OneKVError):
    """The server was called by a name that is not its own."""

    status = 421


class FormError(RequestFailedError):
    """The form that the client wants of the answer proved too hard to keep, in the midst of it."""

    status = 400


_Refusal = (
    BadRequestError | UnauthorizedError | ForbiddenError | NotFoundError | TooLargeError | MisdirectedError | FormError
)


def status_of(error: OneKVError) -> int:
    if isinstance(error, _Refusal):
        return error.status
    if isinstance(error, TooLongError):
        return 413
    if isinstance(error, PromptError | SettingError):
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
    request_id = f"req_{secrets.token_hex(12)}"
    log.error("request %s failed", request_id, exc_info=error)
    return RequestFailedError(f"internal error; the server's log has it as {request_id}")


def headers_of(error: OneKVError) -> dict[str, str]:
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, MemoryBudgetError) and not isinstance(error, TooLongError):
        return {"Retry-After": "10"}
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
    code = {TooLongError: "context_length_exceeded", NotFoundError: "not_found"}.get(type(error))
    field = error.field if isinstance(error, BadRequestError) else None
    return {"error": {"message": str(error), "type": kind, "param": field, "code": code}}


def anthropic_body(error: OneKVError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status_of(error), "invalid_request_error")
    field = error.field if isinstance(error, BadRequestError) else None
    message = f"{field}: {error}" if field else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}}
