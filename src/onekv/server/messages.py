"""Messages in the form that the model's chat template accepts.

Templates differ in what they reject: a second system message, one after the user's, any at all, roles that do not
alternate, arguments that are not an object. A template is tested with tiny messages, once; whatever it accepts is left
unchanged, since the same messages must become the same prompt. What it rejects, or silently drops, is rewritten:

    several system messages at the start    joined into one by an empty line
    a system message later on               becomes user text in <system> tags in the same place: moved to the front, it
                                            would change the start of the prompt, and nothing after it would be cached
    a system message, if none is accepted   is prepended to the first user message
    a system message and nothing else       becomes user text, if the template does not accept it alone
    two user messages in a row, or two      joined into one by an empty line
    answers
    an answer before any user message       gets a user message before it: `GREETING`
    a user message after a call or its      gets an answer before it: `NOTED`
    result
    arguments that are text                 the call becomes content, its result user text
    reasoning next to text and a call       is removed
    ids of calls that are not nine          are replaced by a hash of that length, in the call and in its result
    letters or digits

If the last message is an assistant message without calls, the answer continues it (`continues`).
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..ask import TEMPLATE_ERRORS
from .call import ChatCall, ChatMessage
from .errors import BadRequestError
from .segments import SHORT_ID

# What is said where a template wants somebody to have spoken.
GREETING, NOTED = "Hello.", "Noted."


@dataclass(frozen=True)
class Taken:
    """What a template takes; by default everything."""

    system: bool = True
    several_systems: bool = True
    late_system: bool = True
    # A conversation that has nothing else.
    lone_system: bool = True
    users_in_a_row: bool = True
    answers_in_a_row: bool = True
    answer_first: bool = True
    user_after_result: bool = True
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
    messages = _with_text_results(messages, taken)
    messages = [_plainer(message, taken) for message in messages]
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, rest = messages[:count], messages[count:]
    if len(first) > 1 and not taken.several_systems:
        first = [{"role": "system", "content": _joined(first)}]
    if not taken.late_system:
        rest = [_as_user(message) if message["role"] == "system" else message for message in rest]
    if first and not (taken.system and (rest or taken.lone_system)):
        first = [{"role": "user", "content": _joined(first)}]
    return _alternating([*first, *rest], taken)


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
    return "\n\n".join(message["content"] for message in messages if message.get("content"))


def _alternating(messages: list[ChatMessage], taken: Taken) -> list[ChatMessage]:
    runs: list[list[ChatMessage]] = []
    for message in messages:
        if runs and _joins(runs[-1][-1], message, taken):
            runs[-1].append(message)
        else:
            runs.append([message])
    found: list[ChatMessage] = []
    begun = taken.answer_first
    for run in runs:
        before, role = found[-1] if found else {"role": "system"}, run[0]["role"]
        if role == "assistant" and not begun:
            found.append({"role": "user", "content": GREETING})
        begun |= role != "system"
        if role == "user" and (before["role"] == "tool" or before.get("tool_calls")) and not taken.user_after_result:
            found.append({"role": "assistant", "content": NOTED})
        found.append(run[-1] | {"content": _joined(run)} if len(run) > 1 else run[0])
    return found


def _joins(before: ChatMessage, message: ChatMessage, taken: Taken) -> bool:
    """Whether the template wants both as one."""
    role = message["role"]
    if role != before["role"]:
        return False
    if role == "assistant":
        return not (taken.answers_in_a_row or before.get("tool_calls"))
    return role == "user" and not taken.users_in_a_row


def _with_text_results(messages: list[ChatMessage], taken: Taken) -> list[ChatMessage]:
    """The results of calls that become text are the user's text: some templates drop a result without its call."""
    if taken.text_arguments:
        return messages
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    broken = {call["id"] for call in calls if not isinstance(call["function"]["arguments"], dict)}
    return [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool" and message["tool_call_id"] in broken
        else message
        for message in messages
    ]


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
    def text_of(*messages: ChatMessage) -> str | None:
        try:
            return str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True))
        except TEMPLATE_ERRORS:
            return None

    def takes(*messages: ChatMessage) -> bool:
        text = text_of(*messages)
        return text is not None and all(message["content"] in text for message in messages)

    def calling(arguments: Any = None, call_id: str = CALL_ID, **more: str) -> list[ChatMessage]:
        """Not every template renders the text next to a call."""
        function = {"name": "look", "arguments": {"at": "it"} if arguments is None else arguments}
        calls = [{"id": call_id, "type": "function", "function": function}]
        result = _word("tool", "seen") | {"tool_call_id": call_id, "name": "look"}
        return [user, _word("assistant", "looks") | {"tool_calls": calls, **more}, result]

    user, answer, later = _word("user", "asks"), _word("assistant", "answers"), _word("user", "thanks")
    if not takes(user, answer, later):
        # Whatever it wants, it is not known here.
        return Taken()
    rules, more, again = _word("system", "rules"), _word("system", "more"), _word("assistant", "adds")
    calls = text_of(*calling()) is not None
    # Some write it before the last message, if that is a user's, or not at all.
    system = takes(rules, user) and takes(rules, user, answer)
    system = system and (not calls or rules["content"] in (text_of(rules, *calling()) or ""))
    late = [(rules, user, more), (rules, user, more, answer, later), (rules, user, answer, more, later)]
    return Taken(
        system=system,
        several_systems=takes(rules, more, user),
        late_system=system and all(takes(*talk) for talk in late),
        lone_system=takes(rules),
        users_in_a_row=takes(user, later),
        answers_in_a_row=takes(user, answer, again, later),
        answer_first=takes(answer, later),
        user_after_result=not calls or text_of(*calling(), later) is not None,
        text_arguments=not calls or text_of(*calling("{at")) is not None,
        thoughtful_calls=not calls or text_of(*calling(reasoning_content="Hm")) is not None,
        any_call_id=not calls or text_of(*calling(call_id=LONG_CALL_ID)) is not None,
    )


def _word(role: str, word: str) -> ChatMessage:
    """With a word that no template has in its own text."""
    return {"role": role, "content": f"onekv {word}"}
