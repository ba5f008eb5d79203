"""The output of one response: the API's output items, and the stream events for them."""

from collections.abc import Iterator
from typing import Any

from ..deltas import TextDelta, ToolCallDelta, ToolCallPart
from .common import TokenTexts, new_id
from .schema import as_arguments

# As the API has them, before they are written.
StreamEvent = dict[str, Any]
OutputItem = dict[str, Any]


class ResponseOutput:
    """Each item is added, filled by deltas and done before the next one is added."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self.items: list[OutputItem] = []
        # The last item of `items` while text is still added to it.
        self._open: OutputItem | None = None

    def add(self, delta: TextDelta | ToolCallPart | ToolCallDelta) -> Iterator[StreamEvent]:
        if isinstance(delta, ToolCallPart):
            if delta.first:
                yield from self._begin_call(delta.name, delta.id)
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": delta.text}
            return
        if isinstance(delta, ToolCallDelta):
            yield from self._call(delta)
            return
        kind = "message" if delta.kind == "content" else "reasoning"
        if self._open is None or self._open["type"] != kind:
            yield from self.close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += delta.text
        event = {"type": f"response.{content['type']}.delta", **self._place(), "content_index": 0, "delta": delta.text}
        if kind == "message":
            event["logprobs"] = self._logprobs(delta)
            content["logprobs"] += event["logprobs"]
        yield event

    def close(self, status: str) -> Iterator[StreamEvent]:
        """End the item that is open, if one is."""
        if self._open is None:
            return
        item, self._open = self._open, None
        item["status"] = status
        content = item["content"][0]
        done = {
            "type": f"response.{content['type']}.done",
            **self._place(),
            "content_index": 0,
            "text": content["text"],
        }
        if item["type"] == "message":
            done["logprobs"] = content["logprobs"]
        yield done
        yield {"type": "response.content_part.done", **self._place(), "content_index": 0, "part": content}
        yield self._item_event("done")

    def cut_off(self) -> None:
        """Nothing follows: text stays as far as it came, a call that was begun is dropped."""
        for _ in self.close("incomplete"):
            pass
        self.items = [item for item in self.items if item["status"] != "in_progress"]

    def message(self) -> dict[str, Any]:
        """All of it as a message of a conversation."""
        texts = {"message": "", "reasoning": ""}
        calls = []
        for item in self.items:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": as_arguments(item["arguments"])}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
            else:
                texts[item["type"]] += item["content"][0]["text"]
        message: dict[str, Any] = {"role": "assistant", "content": texts["message"]}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        return message

    def _begin(self, kind: str) -> Iterator[StreamEvent]:
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: OutputItem = {"id": new_id("rs_"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        self._open = item
        self.items.append(item)
        yield self._item_event("added")
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": {**content}}
        item["content"].append(content)

    def _begin_call(self, name: str, call_id: str) -> Iterator[StreamEvent]:
        yield from self.close("completed")
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        self.items.append(item)
        yield self._item_event("added")

    def _call(self, call: ToolCallDelta) -> Iterator[StreamEvent]:
        if not call.in_parts:
            yield from self._begin_call(call.name, call.id)
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": call.arguments}
        item = self.items[-1]
        item |= {"arguments": call.arguments, "status": "completed" if call.complete else "incomplete"}
        done = {"type": "response.function_call_arguments.done", **self._place(), "name": call.name}
        yield done | {"arguments": call.arguments}
        yield self._item_event("done")

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_event(self, what: str) -> StreamEvent:
        index = len(self.items) - 1
        return {"type": f"response.output_item.{what}", "output_index": index, "item": self.items[-1]}

    def _logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        return self._texts.chat(delta.tokens, delta.logprobs) if delta.logprobs else []
