"""Messages in the form that the model's chat template accepts.

Templates differ in what they reject: a second system message, one after the user's, any at all, two user messages in a
row, arguments that are not an object. A template is tested with tiny messages, once; whatever it accepts is left
unchanged, since the same messages must become the same prompt. What it rejects, or silently drops, is rewritten:

    several system messages at the start    joined into one by an empty line
    a system message later on               becomes user text in <system> tags in the same place: moved to the front, it
                                            would change the start of the prompt, and nothing after it would be cached
    a system message, if none is accepted   is prepended to the first user message
    two user messages in a row              joined into one by an empty line
    arguments that are text                 the call becomes content
    reasoning next to text and a call       is removed
    ids of calls that are not nine          are replaced by a hash of that length, in the call and in its result
    letters or digits

If the last message is an assistant message without calls, the answer continues it (`continues`).
"""

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

from ..ask import TEMPLATE_ERRORS
from .call import ChatCall, ChatMessage
from .errors import BadRequestError
from .segments import SHORT_ID


@dataclass(frozen=True)
class Taken:
    """What a template takes; by default everything."""

    system: bool = True
    several_systems: bool = True
    late_system: bool = True
    users_in_a_row: bool = True
    text_arguments: bool = True
    thoughtful_calls: bool = True
    any_call_id: bool = True


# Some templates want nine letters or digits; other ids are longer.
CALL_ID, LONG_CALL_ID = "call00001", "call_0123456789abcdef01234567"

_known: "WeakKeyDictionary[Any, Taken]" = WeakKeyDictionary()


def fitted(tokenizer: Any, messages: list[ChatMessage]) -> list[ChatMessage]:
    """`messages`, changed where the template of `tokenizer` would refuse them."""
    taken = _known.get(tokenizer)
    if taken is None:
        taken = _known[tokenizer] = _try_out(tokenizer)
    if messages[-1]["role"] == "assistant" and not (messages[-1].get("content") or messages[-1].get("tool_calls")):
        # Nothing to continue from.
        messages = messages[:-1]
    messages = [_plainer(message, taken) for message in messages]
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, rest = messages[:count], messages[count:]
    if len(first) > 1 and not taken.several_systems:
        first = [{"role": "system", "content": _joined(first)}]
    if not taken.late_system:
        rest = [_as_user(message) if message["role"] == "system" else message for message in rest]
    if first and not taken.system:
        first = [{"role": "user", "content": _joined(first)}]
    messages = [*first, *rest]
    return messages if taken.users_in_a_row else _without_rows(messages)


def continues(call: ChatCall) -> bool:
    """Whether the answer continues from the last message. Raises BadRequestError if it must also have a form."""
    last = call.messages[-1]
    if last["role"] != "assistant" or not last.get("content") or last.get("tool_calls"):
        return False
    if call.schema is not None or call.tool_choice not in ("auto", "none"):
        raise BadRequestError(
            "the last message is the assistant's, which the answer continues: response_format and tool_choice cannot "
            "be enforced for it; end with a user message",
            f"messages.{len(call.messages) - 1}",
        )
    return True


def _as_user(message: ChatMessage) -> ChatMessage:
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}


def _joined(messages: list[ChatMessage]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _without_rows(messages: list[ChatMessage]) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    for role, run in groupby(messages, lambda message: message["role"]):
        same = list(run)
        found += [{"role": "user", "content": _joined(same)}] if role == "user" and len(same) > 1 else same
    return found


def _plainer(message: ChatMessage, taken: Taken) -> ChatMessage:
    if not taken.any_call_id and "tool_call_id" in message:
        message = message | {"tool_call_id": _nine(message["tool_call_id"])}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not taken.any_call_id:
        calls = [call | {"id": _nine(call["id"])} for call in calls]
        message = message | {"tool_calls": calls}
    if not taken.thoughtful_calls and message.get("content"):
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    if not taken.text_arguments:
        good = [call for call in calls if isinstance(call["function"]["arguments"], dict)]
        bad = [json.dumps(call["function"], ensure_ascii=False) for call in calls if call not in good]
        content = "\n".join([*([message["content"]] if message.get("content") else []), *bad])
        message = message | {"content": content, "tool_calls": good}
    return message


def _nine(call_id: str) -> str:
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _try_out(tokenizer: Any) -> Taken:
    def text_of(messages: list[ChatMessage]) -> str | None:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TEMPLATE_ERRORS:
            return None

    def takes(*messages: ChatMessage) -> bool:
        text = text_of([*messages])
        return text is not None and all(message["content"] in text for message in messages)

    def takes_call(arguments: Any, call_id: str = CALL_ID, **more: str) -> bool:
        """Not every template renders the text next to a call."""
        calls = [{"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}]
        result = {"role": "tool", "tool_call_id": call_id, "name": "look", "content": "Seen"}
        return text_of([user, {**said("assistant", "Looking"), "tool_calls": calls, **more}, result]) is not None

    def said(role: str, word: str) -> ChatMessage:
        return {"role": role, "content": word}

    user, answer, later = said("user", "Hello"), said("assistant", "Greetings"), said("user", "Thanks")
    if not takes(user, answer, later):
        # Whatever it wants, it is not known here.
        return Taken()
    rules, more = said("system", "Rules"), said("system", "Instructions")
    system = takes(rules, user)
    calls = takes_call({"at": "it"})
    return Taken(
        system=system,
        several_systems=takes(rules, more, user),
        late_system=system and takes(rules, user, more) and takes(rules, user, answer, more, later),
        users_in_a_row=takes(user, later),
        text_arguments=not calls or takes_call("{at"),
        thoughtful_calls=not calls or takes_call({"at": "it"}, reasoning_content="Hm"),
        any_call_id=not calls or takes_call({"at": "it"}, LONG_CALL_ID),
    )
