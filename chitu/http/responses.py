"""Answers and server-sent events of `/v1/responses`, as bytes. Pure; an `AnswerFormat` beside those in `sse.py`.

A chat's message is a list of items here: reasoning, message, function calls, each opened, filled and closed by events
of its own. The last event is the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from chitu.errors import ChituError
from chitu.http.messages.delta import CallDelta, MessageDelta
from chitu.http.proof import Proof
from chitu.http.replies import IncompleteDetails, ResponsesError, ResponsesReply, ResponsesUsageReply
from chitu.http.sse import ID_PREFIXES, FinishedChoice, UsageCount

_json = msgspec.json.Encoder().encode


class ResponsesFormat:
    done = b""
    """Bytes after the last event: none."""

    def __init__(self, response_id: str, created_s: int, model: str, echo: dict[str, Any]) -> None:
        """`echo`: see `echo_of`."""
        self._id = response_id
        self._whole = ResponsesReply(
            id=ID_PREFIXES[2] + response_id,
            object="response",
            created_at=created_s,
            model=model,
            status="in_progress",
            error=None,
            incomplete_details=None,
            **echo,
            output=[],
            usage=None,
        )
        self._reason = ""
        """Why the text ended, once it has."""
        self._output: list[dict[str, Any]] = []
        """Items so far; the last one is open unless `_kind` is empty."""
        self._text: list[str] = []
        """Text of the open item."""
        self._kind = ""
        """Kind of the open item: `message`, `reasoning`, or the index of a call."""
        self._num_events = 0

    # ----------------------------------------------------------------------------------------------------- not streamed

    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        (choice,) = choices
        self._take(choice.text)
        self._add_proof(proof)
        yield _json(self._ended(choice.finish_reason, usage))

    # --------------------------------------------------------------------------------------------------------- streamed

    def opening(self, index: int) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def delta(
        self, index: int, text: str | MessageDelta, token_ids: list[int] | None, logprobs: bytes | None = None
    ) -> bytes:
        return self._take(text)

    def last(
        self,
        index: int,
        text: str | MessageDelta,
        reason: str,
        token_ids: list[int] | None,
        logprobs: bytes = b"null",
    ) -> bytes:
        """Return the events of the last text. The answer itself follows with its usage."""
        self._reason = reason
        return self._take(text)

    def usage(self, usage: UsageCount | None, proof: Proof | None = None) -> bytes:
        assert usage is not None  # this route's answers always have it
        self._add_proof(proof)
        closing = self._close(_status(self._reason))
        whole = self._ended(self._reason, usage)
        return closing + self._lifecycle(f"response.{whole.status}")

    def with_usage(self, event: bytes, usage: UsageCount) -> bytes:
        return event

    def error(self, error: ChituError) -> bytes:
        """Return the last events of an answer that has begun."""
        closing = self._close("incomplete")
        whole = self._whole
        whole.status, whole.error, whole.output = "failed", ResponsesError(error.code, error.message), self._output
        return closing + self._lifecycle("response.failed")

    # -------------------------------------------------------------------------------------------------------- the items

    def _add_proof(self, proof: Proof | None) -> None:
        if proof is not None:
            self._whole.chitu = proof

    def _ended(self, reason: str, usage: UsageCount) -> ResponsesReply:
        status, whole = _status(reason), self._whole
        self._close(status)
        whole.status, whole.output = status, self._output
        if reason == "length":
            whole.incomplete_details = IncompleteDetails("max_output_tokens")
        told = usage.reply()
        whole.usage = ResponsesUsageReply(
            told.prompt_tokens,
            told.prompt_tokens_details,
            told.completion_tokens,
            told.completion_tokens_details,
            told.total_tokens,
        )
        return whole

    def _take(self, delta: str | MessageDelta) -> bytes:
        """Return a part of the message as events."""
        if isinstance(delta, str):
            return self._add("message", delta) if delta else b""
        events = b""
        if delta.reasoning:
            events += self._add("reasoning", delta.reasoning)
        if delta.content:
            events += self._add("message", delta.content)
        for call in delta.calls:
            events += self._add(str(call.place), call.arguments, call)
        return events

    def _add(self, kind: str, text: str, call: CallDelta | None = None) -> bytes:
        events = b""
        if kind != self._kind:
            events = self._close("completed") + self._open(kind, call)
        if not text:
            return events
        self._text.append(text)
        name = "function_call_arguments" if call is not None else _TEXTS[kind][0]
        return events + self._event(
            f"response.{name}.delta", **self._place(kind), delta=text, **_LOGPROBS.get(kind, {})
        )

    def _open(self, kind: str, call: CallDelta | None) -> bytes:
        self._kind, self._text = kind, []
        number = len(self._output)
        item: dict[str, Any]
        if call is not None:
            item = {"id": f"fc_{self._id}_{number}", "type": "function_call", "call_id": call.id, "name": call.name}
            item["arguments"] = ""
        elif kind == "reasoning":
            item = {"id": f"rs_{self._id}_{number}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{self._id}_{number}", "type": "message", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        opened = self._event("response.output_item.added", output_index=number, item=item)
        if call is not None:
            return opened
        return opened + self._event("response.content_part.added", **self._place(kind), part=_part(kind, ""))

    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one."""
        if not self._kind:
            return b""
        item, kind, text = self._output[-1], self._kind, "".join(self._text)
        place = self._place(kind)
        self._kind = ""
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            item["content"] = [_part(kind, text)]
            events = self._event(f"response.{_TEXTS[kind][0]}.done", **place, text=text, **_LOGPROBS.get(kind, {}))
            events += self._event("response.content_part.done", **place, part=item["content"][0])
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, kind: str) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return {**place, "content_index": 0} if kind in _TEXTS else place

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, response=self._whole)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _json(event) + b"\n\n"


_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}),
    "reasoning": ("reasoning_text", {}),
}
"""Kinds of items that have text parts -> the part's type and its further fields."""
_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}}


def _part(kind: str, text: str) -> dict[str, Any]:
    name, more = _TEXTS[kind]
    return {"type": name, "text": text, **more}


def _status(reason: str) -> Literal["incomplete", "completed"]:
    return "incomplete" if reason == "length" else "completed"
