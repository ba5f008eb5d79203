"""Base of the request bodies of all APIs: strict types, and only text and numbers that can be sent back."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


def whole(text: str) -> str:
    """Raises ValueError for a lone surrogate, which no tokenizer accepts and no answer can repeat."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate") from None
    return text


def sendable(value: Any) -> Any:
    """Raises ValueError for what is not JSON: NaN, a lone surrogate."""
    whole(json.dumps(value, ensure_ascii=False, allow_nan=False))
    return value


Str = Annotated[str, AfterValidator(whole)]
# Checked before it is looked into, so that an error never has to name a key that is no text.
JsonObject = Annotated[dict[str, Any], BeforeValidator(sendable)]


class Body(BaseModel):
    """Fields that are not known are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
