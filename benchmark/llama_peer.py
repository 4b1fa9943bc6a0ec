"""llama.cpp on one thread, as a child process of `beside_llama.py`: `PYTHON llama_peer.py FILE.gguf CONTEXT`.

Run by a Python that has `llama_cpp` and need not have chitu. Reads a JSON object a line from stdin and answers each
with one on stdout: `{"tokenize": text}` with `tokens`; `{"begin": prompts}` (of equal length, one a sequence) with the
first token of each; `{"steps": n}` with the tokens of each of n steps; `{"end": true}` forgets the sequences. `seconds`
is the CPU time of computing and of choosing the most likely token, of each step. `why` says what is missing.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

BATCH = 512


class Peer:
    """A model, with a context for each count of sequences, which keeps its memory."""

    def __init__(self, llama: Any, file: str, context_tokens: int) -> None:
        self._llama, self._context_tokens = llama, context_tokens
        self._silence = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._silence, None)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        if not self._model:
            raise OSError(f"llama.cpp cannot load {file}")
        self._sampler = llama.llama_sampler_init_greedy()
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[int, Any] = {}
        self._context: Any = None
        self._tokens: list[int] = []
        """The newest of each sequence, which its next step reads."""
        self._length = 0
        """Tokens of each sequence that have been computed."""

    def tokenize(self, text: str) -> list[int]:
        data, room = text.encode(), len(text.encode()) + 8
        tokens = (self._llama.llama_token * room)()
        vocabulary = self._llama.llama_model_get_vocab(self._model)
        count = self._llama.llama_tokenize(vocabulary, data, len(data), tokens, room, True, True)
        return list(tokens[:count])

    def begin(self, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
        """Compute the prompts, one after the other. Return seconds and first tokens, of one step."""
        if len(prompts) not in self._contexts:
            self._contexts[len(prompts)] = self._new_context(len(prompts))
        self._context, self._length, self._tokens, seconds = self._contexts[len(prompts)], len(prompts[0]), [], 0.0
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), BATCH):
                rows = [(token, start + i, sequence) for i, token in enumerate(prompt[start : start + BATCH])]
                took_s, tokens = self._decode(rows, [len(rows) - 1])
                seconds += took_s
            self._tokens += tokens
        return [seconds], [self._tokens]

    def steps(self, count: int) -> tuple[list[float], list[list[int]]]:
        """Decode steps of all sequences together. Return the seconds and the tokens of each."""
        seconds, tokens = [], []
        for _ in range(count):
            rows = [(token, self._length, sequence) for sequence, token in enumerate(self._tokens)]
            took_s, self._tokens = self._decode(rows, list(range(len(rows))))
            self._length += 1
            seconds.append(took_s)
            tokens.append(self._tokens)
        return seconds, tokens

    def end(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def _new_context(self, sequences: int) -> Any:
        settings = self._llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = sequences * self._context_tokens, sequences
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = 1
        context = self._llama.llama_init_from_model(self._model, settings)
        if not context:
            raise OSError(f"llama.cpp makes no context of {sequences} sequences of {self._context_tokens} tokens")
        return context

    def _decode(self, rows: list[tuple[int, int, int]], outputs: list[int]) -> tuple[float, list[int]]:
        """Compute rows of token, position and sequence. Return the seconds, and the tokens behind some of the rows."""
        llama, batch = self._llama, self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = i in outputs
        began_s = time.process_time()
        if code := llama.llama_decode(self._context, batch):
            raise OSError(f"llama_decode returned {code}")
        tokens = [llama.llama_sampler_sample(self._sampler, self._context, row) for row in outputs]
        return time.process_time() - began_s, tokens


def answer(peer: Peer, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one line."""
    if "tokenize" in asked:
        return {"tokens": peer.tokenize(asked["tokenize"])}
    if "end" in asked:
        peer.end()
        return {}
    seconds, tokens = peer.begin(asked["begin"]) if "begin" in asked else peer.steps(asked["steps"])
    return {"seconds": seconds, "tokens": tokens}


def main() -> None:
    try:
        llama = importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        print(json.dumps({"why": f"{sys.executable} cannot import llama_cpp: {error}"}), flush=True)
        return
    try:
        peer = Peer(llama, sys.argv[1], int(sys.argv[2]))
        print(json.dumps({"version": llama.__version__}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(peer, json.loads(line))), flush=True)
    except OSError as error:
        print(json.dumps({"why": str(error)}), flush=True)


if __name__ == "__main__":
    main()
