"""Logprobs of a choice in OpenAI's two forms. Pure; loop thread.

Logprobs from D wait here until their text is sent, so a client gets both together. JSON is written token by token as
tokens arrive, since many may show no text for long, and leaves in pieces: so an answer with many tokens and candidates
does not block the event loop at its end. A prompt's is written once, for all its choices (`PromptAnswer`).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from chitu.errors import Internal
from chitu.protocol import unpack_logprobs
from chitu.tokenizer import Detokenizer, Tokenizer

LOWEST = -9999.0
"""Logprob of an impossible token; JSON has no infinity."""
TokenTexts = Callable[[int], bytes]
"""Token id -> JSON about it. Made when the token first occurs."""

ENTRIES_PER_PIECE = 256
"""Tokens in one piece of JSON."""

_json = msgspec.json.Encoder().encode
_COLUMNS = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[')


def _joined(entries: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the entries of a JSON array without its brackets, in pieces."""
    for start in range(0, len(entries), ENTRIES_PER_PIECE):
        if start:
            yield b","
        yield b",".join(entries[start : start + ENTRIES_PER_PIECE])


def _cut(entries: list[bytes], count: int) -> list[bytes]:
    """Remove the first entries, and return them."""
    taken = entries[:count]
    del entries[:count]
    return taken


def _shown(data: bytes | None, token_id: int, prefix: str) -> str:
    """Return a token's text. For a part of a character, return its bytes as escapes."""
    if data is None:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


def completion_texts(bytes_of: Callable[[int], bytes | None]) -> TokenTexts:
    """Return a function that gives a token's text as a JSON string."""
    return functools.cache(lambda token_id: _json(_shown(bytes_of(token_id), token_id, "bytes:")))


def chat_texts(bytes_of: Callable[[int], bytes | None]) -> TokenTexts:
    """Return a function that gives the fields `token` and `bytes` of a token as JSON, followed by a comma."""

    def fields(token_id: int) -> bytes:
        data = bytes_of(token_id)
        shown = _json({"token": _shown(data, token_id, ""), "bytes": None if data is None else list(data)})
        return shown[:-1] + b","

    return functools.cache(fields)


def _number(logprob: float) -> bytes:
    return _json(max(logprob, LOWEST))


class ChoiceLogprobs(abc.ABC):
    """Logprobs of one choice: `push` writes those of received tokens, `show` lets those out whose text is sent, `take`
    returns their JSON."""

    def __init__(self) -> None:
        self._waiting: list[float] = []
        """Logprobs of tokens that are written and not shown."""
        self._num_shown = 0
        """Entries that are shown and not taken."""
        self._sum, self._count = 0.0, 0
        """Sum and number of the logprobs of the answer's tokens shown so far."""

    @property
    def mean(self) -> float:
        """Mean logprob of the answer's tokens shown so far."""
        return self._sum / max(1, self._count)

    def push(self, token_ids: Sequence[int], packed: Sequence[bytes]) -> None:
        """Write received tokens with their logprobs, in token order."""
        for token_id, line in zip(token_ids, packed):  # noqa: B905 - `show` finds what is missing
            own, top = unpack_logprobs(line)
            self._write(token_id, own, top)
            self._waiting.append(own)

    def show(self, num_tokens: int) -> None:
        """Let the next tokens out. Raise Internal if their logprobs were not received."""
        if num_tokens > len(self._waiting):
            raise Internal("an instance sent tokens without the requested logprobs")
        self._sum += sum(self._waiting[:num_tokens])
        del self._waiting[:num_tokens]
        self._count += num_tokens
        self._num_shown += num_tokens

    def of(self, num_tokens: int) -> bytes:
        """Show the next tokens and take their JSON."""
        self.show(num_tokens)
        return self.take()

    @abc.abstractmethod
    def _write(self, token_id: int, own: float, top: Sequence[tuple[int, float]]) -> None: ...

    def take(self) -> bytes:
        """Return the object `logprobs` of the tokens shown since the last call."""
        return b"".join(self.pieces())

    @abc.abstractmethod
    def pieces(self, prompt: PromptAnswer | None = None) -> Iterator[bytes]:
        """Take the same in pieces. `prompt`: the prompt that the choice repeats, to be included."""


class ChatLogprobs(ChoiceLogprobs):
    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts
        self._content: list[bytes] = []

    def _entry(self, token_id: int, logprob: float) -> bytes:
        return self._texts(token_id) + b'"logprob":' + _number(logprob)

    def _write(self, token_id: int, own: float, top: Sequence[tuple[int, float]]) -> None:
        others = b"},".join([self._entry(other, logprob) for other, logprob in top])
        self._content.append(self._entry(token_id, own) + b',"top_logprobs":[' + others + (b"}]}" if others else b"]}"))

    def pieces(self, prompt: PromptAnswer | None = None) -> Iterator[bytes]:
        content = _cut(self._content, self._num_shown)
        self._num_shown = 0
        yield b'{"content":['
        yield from _joined(content)
        yield b'],"refusal":null}'


class CompletionLogprobs(ChoiceLogprobs):
    """Logprobs of a completion, or of a prompt that it repeats. `detokenizer`: a fresh one for the text, for
    `text_offset`; `offset`: characters before it."""

    def __init__(self, texts: TokenTexts, detokenizer: Detokenizer, offset: int = 0, num_added: int = 0) -> None:
        """`num_added`: tokens before the text that the tokenizer added."""
        super().__init__()
        self._texts = texts
        self._detokenizer = detokenizer
        self._offset = offset
        self._num_added = num_added
        """Tokens to come that are not part of the choice's text."""
        self._columns: tuple[list[bytes], list[bytes], list[bytes], list[bytes]] = ([], [], [], [])

    def write_prompt(self, token_ids: Sequence[int], lines: Sequence[bytes | None], count: int) -> None:
        """Write the next tokens of a prompt that the answer repeats, with up to `count` candidates each."""
        for token_id, packed in zip(token_ids, lines, strict=True):
            if packed is None:
                self._append(token_id, b"null", b"null")
            else:
                own, top = unpack_logprobs(packed)
                self._write(token_id, own, top[:count])

    def _write(self, token_id: int, own: float, top: Sequence[tuple[int, float]]) -> None:
        # Always include the token itself. If two tokens have the same text, the likelier one counts.
        top_of = {self._texts(other): logprob for other, logprob in reversed([*top, (token_id, own)])}
        ordered = sorted(top_of.items(), key=lambda item: -item[1])
        top_json = b"{" + b",".join([name + b":" + _number(logprob) for name, logprob in ordered]) + b"}"
        self._append(token_id, _number(own), top_json)

    def _append(self, token_id: int, number: bytes, top: bytes) -> None:
        tokens, numbers, tops, offsets = self._columns
        tokens.append(self._texts(token_id))
        numbers.append(number)
        tops.append(top)
        offsets.append(b"%d" % self._offset)
        if self._num_added:
            self._num_added -= 1
        else:
            self._offset += len(self._detokenizer.push((token_id,)))

    def pieces(self, prompt: PromptAnswer | None = None) -> Iterator[bytes]:
        columns = [_cut(column, self._num_shown) for column in self._columns]
        self._num_shown = 0
        ahead = prompt.repeated._columns if prompt is not None and prompt.repeated is not None else ([], [], [], [])
        for head, before, column in zip(_COLUMNS, ahead, columns, strict=True):
            yield head
            yield from _joined(before)
            if before and column:
                yield b","
            yield from _joined(column)
        yield b"]}"


class PromptLogprobs:
    """The field `prompt_logprobs` in vLLM's form: for each prompt token an object by token id, null for the first.
    `rank` is the rank among the candidates, null for a token that is none of them."""

    def __init__(self, texts: TokenTexts, count: int) -> None:
        self._texts = texts
        self._count = count
        self._entries: list[bytes] = []

    def write(self, token_ids: Sequence[int], lines: Sequence[bytes | None]) -> None:
        """Write the next tokens of the prompt."""
        for token_id, packed in zip(token_ids, lines, strict=True):
            if packed is None:
                self._entries.append(b"null")
                continue
            own, top = unpack_logprobs(packed)
            ranked = [(other, logprob, b"%d" % rank) for rank, (other, logprob) in enumerate(top[: self._count], 1)]
            if token_id not in {other for other, _, _ in ranked}:
                ranked.insert(0, (token_id, own, b"null"))
            self._entries.append(b"{" + b",".join([self._entry(*one) for one in ranked]) + b"}")

    def _entry(self, token_id: int, logprob: float, rank: bytes) -> bytes:
        return b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}' % (
            *(token_id, _number(logprob), rank),
            self._texts(token_id),
        )

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON in pieces; again and again, since the choices of a prompt share it."""
        yield b"["
        yield from _joined(self._entries)
        yield b"]"


class PromptAnswer(msgspec.Struct, eq=False):
    """What an answer has of a prompt's logprobs, for all choices of the prompt."""

    repeated: CompletionLogprobs | None = None
    """Of the prompt that each choice repeats (`echo`); None if it does not, or without logprobs."""
    field: PromptLogprobs | None = None
    """Of the field `prompt_logprobs`; None if it was not requested."""
    is_pooled: bool = False
    """Whether pooled states come in the place of logprobs."""
    pooled: bytes = b""
    is_written: bool = False
    """Whether they are written. Each choice brings them, and another attempt may bring them again."""


class LogprobTables:
    """Empty logprobs for new choices and prompts, over tables of tokens' texts that fill as tokens occur."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._completion_texts = completion_texts(tokenizer.token_bytes)
        self._chat_texts = chat_texts(tokenizer.token_bytes)

    def of_choice(self, is_chat: bool, skip_special_tokens: bool, offset: int = 0) -> ChoiceLogprobs:
        """Return those of a choice, in the form of its route. `offset`: characters of the prompt that it repeats with
        logprobs."""
        if is_chat:
            return ChatLogprobs(self._chat_texts)
        return CompletionLogprobs(self._completion_texts, self._tokenizer.detokenizer(skip_special_tokens), offset)

    def of_repeated(self, skip_special_tokens: bool, num_added: int | None) -> CompletionLogprobs:
        """Return those of a prompt that choices repeat. `num_added`: tokens before its text that the tokenizer added;
        None if the text was decoded from tokens."""
        # A text that was given has the texts of special tokens.
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens and num_added is None)
        return CompletionLogprobs(self._completion_texts, detokenizer, num_added=num_added or 0)

    def of_prompt(self, count: int) -> PromptLogprobs:
        """Return those of a prompt, with `count` candidates for each token."""
        return PromptLogprobs(self._completion_texts, count)
