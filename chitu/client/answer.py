"""Parser of a streamed answer: server-sent events -> text, token counts and how it ended. Pure.

`RouterClient` feeds it the bytes as the socket delivers them, which may cut an event, a line end or a character.
Invariant: the pieces that `AnswerReader.feed` returns concatenate to `Answer.text`, however the bytes were cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from chitu.errors import ChituError, Internal, from_code


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Answer:
    """One answer as far as it was received; it keeps its text if the rest is lost."""

    request_id: str
    """The X-Request-Id of the request: its key in `GET /cluster`."""
    text: str = ""
    usage: Usage | None = None
    """Token counts; None until the answer is complete."""
    finish_reason: str | None = None
    """Finish reason: `stop` or `length`."""
    is_complete: bool = False
    """Whether the router sent the end of the answer."""
    is_stopped: bool = False
    """Whether the user stopped the answer (Ctrl-C)."""
    error: ChituError | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """One choice of a chat (`delta`) or of a completion (`text`)."""

    delta: _Delta = _Delta()
    text: str = ""
    finish_reason: str | None = None


class ErrorObject(msgspec.Struct, frozen=True):
    """The error object of the OpenAI API."""

    message: str
    code: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: Usage | None = None
    error: ErrorObject | None = None


class EventParser:
    """Splits bytes into the data of each complete server-sent event. Skips comments and other fields."""

    def __init__(self) -> None:
        self._rest = b""
        """Bytes of a line whose end has not arrived."""
        self._after_cr = False
        """Whether the last chunk ended with CR, so that an LF at the start of the next one belongs to it."""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[str]:
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events = []
        for line in lines:
            name, _, value = line.rstrip(b"\r\n").partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not name and not value and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return events


class AnswerReader:
    """Fills an `Answer` from the body of a streamed response."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> str:
        """Return the text that this chunk completes. An error event ends the answer with its error and keeps its text.
        Raise Internal for an event that is no part of an answer."""
        before = len(self._answer.text)
        for data in self._parser.feed(chunk):
            if data == "[DONE]":
                self._answer.is_complete = True
            else:
                self._take(data)
        return self._answer.text[before:]

    def _take(self, data: str) -> None:
        answer = self._answer
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Internal(f"the router sent an event that is no part of an answer: {data[:80]!r} ({error})") from error
        if event.error is not None:
            answer.error = from_code(event.error.code or "internal", event.error.message)
            answer.is_complete = True
            return
        if event.usage is not None:
            answer.usage = event.usage
        for choice in event.choices:
            answer.text += choice.text + (choice.delta.content or "")
            answer.finish_reason = choice.finish_reason or answer.finish_reason
