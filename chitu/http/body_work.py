"""Costly work on untrusted input: decoding JSON, rendering chats, tokenising, compiling grammars. Pure.

`BodyWork` does it, independent of the process: a small body is processed on the event loop of an API process, a large
one and every grammar in a process beside it (`serve/body_process.py`), by the same methods with the same errors. So a
task carries what it needs of the cluster (`ClusterFacts`), and its result can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.grammars import GrammarCompiler
from chitu.http.jobs import ClusterFacts, Job, JobParser, ParseContext
from chitu.http.served_model import ServedModel
from chitu.http.token_counts import TokenCounts, TokensAnswer
from chitu.protocol import Grammar

BodyRoute = Literal["completion", "chat", "responses", "tokenize", "detokenize"]
BODY_S = 30.0
"""Processor time that a body may take. The largest take seconds. One that takes longer has trapped a template, or a
pattern of the tokenizer."""
GRAMMAR_S = 3.0
"""Processor time that a grammar may take. D then compiles it, too, and cannot be interrupted."""


class ReadBody(msgspec.Struct, frozen=True):
    route: BodyRoute
    facts: ClusterFacts
    limit_s: float = BODY_S


class JudgeGrammar(NamedTuple):
    grammar: Grammar
    vocab_size: int
    limit_s: float = GRAMMAR_S


BodyTask = ReadBody | JudgeGrammar


class BodyWork:
    """Work on bodies and grammars."""

    def __init__(self, model: ServedModel, takes_unknown: bool) -> None:
        self._model = model
        jobs, counts = JobParser(model, takes_unknown), TokenCounts(model, takes_unknown)
        self._readers: dict[BodyRoute, Callable[[bytes | bytearray, ParseContext], Job | TokensAnswer]] = {
            "completion": jobs.completion,
            "chat": jobs.chat,
            "responses": jobs.responses,
            "tokenize": counts.tokenize,
            "detokenize": counts.detokenize,
        }
        self._compiler: tuple[int, GrammarCompiler] | None = None

    def read(self, task: ReadBody, raw: bytes | bytearray, require_client: Callable[[], None]) -> Job | TokensAnswer:
        """Parse a body into what its route needs. Calls `require_client` between prompts, which raises if the client no
        longer waits for them. All other errors are for the client."""
        return self._readers[task.route](raw, ParseContext(task.facts, require_client))

    def judge(
        self, task: JudgeGrammar, limited: Callable[[float], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Raise InvalidRequest if D could not compile the grammar. `limited(seconds)`: a context that ends the process
        if the compilation takes more processor time."""
        try:
            if self._compiler is None or self._compiler[0] != task.vocab_size:
                self._compiler = task.vocab_size, GrammarCompiler(self._model.tokenizer, task.vocab_size)
            with limited(task.limit_s):
                self._compiler[1].compile(task.grammar)
        except InvalidRequest:
            raise
        except BaseException as error:
            # Whatever the library raises, even a panic, fails only this request.
            raise InvalidRequest(f"{task.grammar.kind}: it cannot be compiled ({type(error).__name__})") from None


def too_costly(task: BodyTask) -> InvalidRequest:
    """Return the error of a task that took more processor time than its kind may take."""
    limit = f"{task.limit_s:g} s of processor time"
    if isinstance(task, JudgeGrammar):
        return InvalidRequest(f"{task.grammar.kind}: it takes more than {limit} to compile")
    return InvalidRequest(f"the body takes more than {limit} to read; send less at once")
