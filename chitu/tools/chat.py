"""`chitu chat`: chat with the model of a running router from a terminal or a pipe; examples with a known answer.

Runs in the main thread. Answers go to stdout, piece by piece and without any redrawing, so that they read the same over
ssh, in a pipe and in a file; everything else (status lines, errors) goes to stderr, dimmed if that is a terminal.
Ctrl-C ends the running answer and its request.
"""

from __future__ import annotations

import contextlib
import mimetypes
import os
import random
import re
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from chitu.assets.tiny_tasks import Example, facts_for, recall
from chitu.errors import ChituError, ConfigError, InvalidRequest
from chitu.launch.router_client import Answer, RouterClient
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tools.trace import CLUSTER_COLUMNS, cluster_line, cluster_rows, find_request, trace_lines

CHAT_PATH = "/v1/chat/completions"
ANSWER_ROOM_TOKENS = 64
"""Tokens of the context that an example leaves for the answer."""
SHOWN_SENTENCES = 2
"""Sentences of a long list that are shown at its start."""
PROMPT = "> "
EXAMPLE_TOKENS = 600
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
HELP = (
    ("/example [TOKENS]", f"a new conversation with a question on a long list, about {EXAMPLE_TOKENS} tokens"),
    ("/image FILE", "shows the model an image, with the next question; several may be given"),
    ("/cluster", "the instances with their loads"),
    ("/clear", "a new conversation"),
    ("/help", "this"),
    ("/quit", "leave; so does Ctrl-D, and Ctrl-C twice"),
    ("Ctrl-C", "stops the running answer"),
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    model: str | None = None
    """Name of the model; None: the model that the router serves."""
    system: str | None = None
    max_tokens: int | None = None
    """Limit of the answer; None: until the model ends or the context is full."""
    temperature: float = 0.0


Content = str | list[dict[str, Any]]
"""What a user's message has: a text, or parts if there are images."""


@dataclass(slots=True)
class Conversation:
    options: ChatOptions
    turns: list[tuple[Content, str]] = field(default_factory=list)
    """Questions with their answers as far as received; a question without any answer is not kept."""
    images: list[str] = field(default_factory=list)
    """Images of the next question, as data URLs."""

    def clear(self) -> None:
        self.turns.clear()
        self.images.clear()

    def body(self, question: str) -> dict[str, Any]:
        """Return the body of a chat request with this next question."""
        options = self.options
        messages: list[dict[str, Any]] = []
        if options.system:
            messages.append({"role": "system", "content": options.system})
        for asked, answered in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": self._content(question)})
        body: dict[str, Any] = {"model": options.model, "messages": messages, "temperature": options.temperature}
        body["separate_reasoning"] = False  # reasoning is shown as the model writes it
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        return body

    def keep(self, question: str, answer: str) -> None:
        """Note what was asked, which had the images, and what was answered."""
        if answer:
            self.turns.append((self._content(question), answer))
        self.images.clear()

    def _content(self, question: str) -> Content:
        if not self.images:
            return question
        images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return [*images, {"type": "text", "text": question}]


def data_url(path: str) -> str:
    """Return an image's file as a data URL. The router judges what it is. Raise ConfigError if it cannot be read."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"the image {path} cannot be read: {error.strerror}") from error
    if not data:
        raise ConfigError(f"the image {path} is empty")
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return f"data:{kind};base64,{b64encode(data).decode()}"


def recall_example(rng: random.Random, prompt_tokens: int, max_model_len: int | None) -> Example:
    """Return a question over a list of about this many tokens (for chitu-tiny), or fewer if the context is shorter."""
    if max_model_len is not None:
        prompt_tokens = min(prompt_tokens, max_model_len - ANSWER_ROOM_TOKENS)
    return recall(rng, facts_for(prompt_tokens))


def is_right(example: Example, answer: str) -> bool:
    return example.value in answer


def verdict(example: Example, answer: str) -> str:
    """Return a tick, or a cross with the expected answer."""
    return f"✓ {example.value} is right" if is_right(example, answer) else f"✗ expected: {example.answer}"


def shortened(prompt: str) -> str:
    """Return a long list with the sentences in its middle replaced by their number. The question stays."""
    sentences = re.split(r"(?<=[.?!]) ", prompt)
    left_out = len(sentences) - SHOWN_SENTENCES - 2
    if left_out < 2:
        return prompt
    shown = [*sentences[:SHOWN_SENTENCES], f"... {left_out} more sentences ...", *sentences[-2:]]
    return " ".join(shown)


def printable(text: str) -> str:
    """Return the text of an untrusted model without the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def chat(url: str, api_key: str | None, question: str | None, options: ChatOptions, images: Sequence[str] = ()) -> int:
    """Run the chat and return the exit code: 0, 1 if an answer failed, 130 after Ctrl-C. If `question` is None, read it
    from stdin, or chat if stdin is a terminal. `images`: files that the first question has. Raise ChituError if no
    router answers, or a file cannot be read."""
    try:
        shown = [data_url(path) for path in images]
        if question is None and not sys.stdin.isatty():
            question = _question_from(sys.stdin)
        if question is not None and not question.strip():
            raise InvalidRequest("the question is empty")
        client = RouterClient(url, api_key)
        options = replace(options, model=options.model or client.model_name())
        conversation = Conversation(options, images=shown)
        terminal = ChatTerminal(client, conversation, sys.stdout, Console(stderr=True, highlight=False))
        return terminal.converse() if question is None else terminal.ask_once(question)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone. Python would fail once more at exit, when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _question_from(stream: TextIO) -> str:
    try:
        return stream.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the question on stdin is not UTF-8 text: {error}") from error


class ChatTerminal:
    """A chat in the terminal. `out` receives the answers, `notes` the rest."""

    def __init__(self, client: RouterClient, conversation: Conversation, out: TextIO, notes: Console) -> None:
        self._client = client
        self._conversation = conversation
        self._out = out
        self._shown = printable if out.isatty() else str
        """Filter of the answer for a terminal; a file or a pipe receives it unchanged."""
        self._notes = notes

    def ask_once(self, question: str) -> int:
        answer = self._ask(question)
        if answer.is_stopped:
            return INTERRUPTED
        return 1 if answer.error is not None else 0

    def converse(self) -> int:
        """Read and run questions and commands until the user leaves."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its line editing and history)
        self._note(f"{self._conversation.options.model} at {self._client.url}; /help shows the commands")
        if (snapshot := self._snapshot()) is not None:
            self._note(cluster_line(snapshot))
            if snapshot.first_prompt.is_chat:
                self._note(f"for example: {snapshot.first_prompt.text}")
        was_interrupted = False
        while True:
            try:
                line = input(PROMPT).strip()
            except EOFError:
                self._note("")
                return 0
            except KeyboardInterrupt:
                self._note("")
                if was_interrupted:
                    return 0
                was_interrupted = True
                self._note("Ctrl-C once more leaves")
                continue
            try:
                if line in ("/quit", "/exit"):
                    return 0
                if line.startswith("/"):
                    was_interrupted = self._command(line)
                elif line:
                    was_interrupted = self._ask(line).is_stopped
            except KeyboardInterrupt:  # between answers, such as during a slow /cluster
                was_interrupted = True
            except ChituError as error:
                self._complain(error)

    # -------------------------------------------------------------------------------------------------------- commands

    def _command(self, line: str) -> bool:
        """Run a command. Return whether Ctrl-C ended it."""
        name, _, argument = line.partition(" ")
        if name == "/example":
            return self._example(argument.strip())
        if name == "/cluster":
            self._show_cluster()
        elif name == "/image":
            self._add_image(argument.strip())
        elif name == "/clear":
            self._conversation.clear()
            self._note("a new conversation")
        elif name == "/help":
            for command, meaning in HELP:
                self._note(f"{command:18} {meaning}")
        else:
            self._note(f"there is no command {name}; /help shows them")
        return False

    def _add_image(self, path: str) -> None:
        """Have the next question show an image. Raises ConfigError if its file cannot be read."""
        if not path:
            self._note("/image needs the path of a file")
            return
        images = self._conversation.images
        images.append(data_url(path))
        self._note(f"the next question shows {path}" + (f", and {len(images) - 1} before it" if images[1:] else ""))

    def _example(self, argument: str) -> bool:
        if argument and not (argument.isdecimal() and int(argument) > 0):
            self._note(f"/example needs a number of tokens, not {argument}")
            return False
        tokens = int(argument) if argument else EXAMPLE_TOKENS
        example = recall_example(random.Random(), tokens, self._client.cluster().max_model_len)
        self._conversation.clear()
        self._notes.print(shortened(example.prompt), markup=False)
        return self._ask(example.prompt, example).is_stopped

    def _show_cluster(self) -> None:
        snapshot = self._client.cluster()
        length = f"up to {snapshot.max_model_len} tokens" if snapshot.max_model_len is not None else "not served now"
        self._note(
            f"{snapshot.model}, {length}; pages of {snapshot.page_size} tokens; transport {snapshot.transport}; "
            f"{snapshot.in_flight} requests running"
        )
        table = Table(*CLUSTER_COLUMNS, box=None, pad_edge=False)
        for row in cluster_rows(snapshot):
            table.add_row(*row)
        self._notes.print(table)

    # ---------------------------------------------------------------------------------------------------------- asking

    def _ask(self, question: str, example: Example | None = None) -> Answer:
        """Send the question and show the answer as it arrives, whether it is right, and the trace of the request. Keep
        question and answer in the conversation."""
        answer = self._client.stream(CHAT_PATH, self._conversation.body(question), self._write)
        if answer.text and not answer.text.endswith("\n"):
            self._write("\n")
        self._conversation.keep(question, answer.text)
        if answer.error is not None:
            self._complain(answer.error)
        elif answer.is_stopped:
            self._note("stopped")
        elif example is not None:
            style = "green" if is_right(example, answer.text) else "red"
            self._notes.print(verdict(example, answer.text), style=style, markup=False)
        self._report(answer)
        return answer

    def _write(self, text: str) -> None:
        self._out.write(self._shown(text))
        self._out.flush()

    def _report(self, answer: Answer) -> None:
        """Print the status lines. A failure to get them does not fail the answer."""
        snapshot = self._snapshot()
        if snapshot is None:
            return
        request = find_request(snapshot, answer.request_id)
        for line in trace_lines(request) if request is not None else ():
            self._note(line)
        self._note(cluster_line(snapshot))

    def _snapshot(self) -> ClusterSnapshot | None:
        try:
            return self._client.cluster()
        except ChituError as error:
            self._note(f"no status: {error.message}")
            return None

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def _complain(self, error: ChituError) -> None:
        hint = "; /clear starts over" if error.code == "context_length_exceeded" and self._conversation.turns else ""
        self._notes.print(f"chitu: {error.code}: {error.message}{hint}", style="red", markup=False, soft_wrap=True)
