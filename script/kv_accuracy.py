"""Measure what an fp8 KV cache costs in accuracy: answers, loss and logits of chitu-tiny for each dtype of model and
cache.

    python script/kv_accuracy.py [--examples 50]

Each held-out question is computed with its right answer appended; only the logits of the answer's positions count. An
answer is right if greedy decoding would have chosen each of its tokens. Loss is per token of the answers. The error of
logits is the root mean square of the difference from float32 model and cache, divided by that of the float32 logits
about their mean. Runs in one process without a server. Every query reads K and V from the pages, its own token's too.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from chitu.assets import TINY_MODEL_DIR
from chitu.assets.tiny_tasks import facts_for, recall
from chitu.engine.build import load_model
from chitu.kv_cache.pool import KVPool
from chitu.models.config import read_model_spec
from chitu.ops.interface import Batch, Span, tiles_of
from chitu.ops.torch_ops import TorchOps
from chitu.protocol import KVLayout
from chitu.tokenizer import Tokenizer

VARIANTS = (("float32", "float32"), ("float32", "fp8_e4m3"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8_e4m3"))
"""Pairs of model dtype and cache dtype."""
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Question:
    tokens: list[int]
    answer_tokens: int
    """Number of answer tokens at the end of `tokens`."""


def questions(count: int) -> Iterator[Question]:
    """Yield questions over lists of every length up to 2048 tokens, with names and values that training never draws."""
    tokenizer, source = Tokenizer.load(TINY_MODEL_DIR), random.Random(0)
    for index in range(count):
        example = recall(source, facts_for(2048 * (index + 1) // count))
        text = tokenizer.apply_chat_template([{"role": "user", "content": example.prompt}])
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = [*tokenizer.encode(example.answer, add_special_tokens=False), *tokenizer.eos_token_ids[:1]]
        yield Question([*prompt, *answer], len(answer))


class Engine:
    """A model and the pages of one sequence, whose positions fill the pages in order."""

    def __init__(self, model_dtype: str, kv_dtype: str, num_pages: int) -> None:
        spec = read_model_spec(TINY_MODEL_DIR)
        self._model = load_model(TINY_MODEL_DIR, model_dtype, ops=TorchOps())
        layout = KVLayout.uniform(
            "", spec.num_layers, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, kv_dtype, spec.vocab_size
        )  # fmt: skip
        self.pool = KVPool(layout, num_pages, 0)
        self._page_table = torch.arange(num_pages).unsqueeze(0)

    @torch.inference_mode()
    def logits(self, question: Question) -> torch.Tensor:
        """Return float32 `[answer tokens, V]`: the logits from which each answer token is chosen."""
        length = len(question.tokens)
        span = Span(0, length, 0, 0)
        batch = Batch(
            slots_T=torch.zeros(length, dtype=torch.int64),
            positions_T=torch.arange(length),
            page_table=self._page_table,
            spans=(span,),
            spans_X4=torch.tensor([[0, length, 0, 0]]),
            tiles_Y4=torch.tensor(tiles_of([span])),
            decode_row=length,
            decode_slots=(),
            max_decode_len=0,
        )
        hidden_TD = self._model.forward(torch.tensor(question.tokens), batch, self.pool.k, self.pool.v)
        logits = self._model.logits(hidden_TD[-question.answer_tokens - 1 : -1])
        assert logits is not None
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50)
    asked = list(questions(parser.parse_args().examples))
    num_pages = -(-max(len(question.tokens) for question in asked) // PAGE_SIZE)
    exact: list[torch.Tensor] = []
    print("| model | cache | bytes of a page | right | loss of a token | error of logits | largest |")
    print("|---|---|---|---|---|---|---|")
    for model_dtype, kv_dtype in VARIANTS:
        engine = Engine(model_dtype, kv_dtype, num_pages)
        found = [engine.logits(question) for question in asked]
        exact = exact or found
        answers = [torch.tensor(question.tokens[-question.answer_tokens :]) for question in asked]
        right = sum(bool((x.argmax(-1) == answer).all()) for x, answer in zip(found, answers, strict=True))
        loss = torch.nn.functional.cross_entropy(torch.cat(found), torch.cat(answers))
        difference, whole = torch.cat(found) - torch.cat(exact), torch.cat(exact)
        spread = (whole - whole.mean(-1, keepdim=True)).pow(2).mean().sqrt()
        error, largest = difference.pow(2).mean().sqrt() / spread, difference.abs().max() / spread
        print(
            f"| {model_dtype} | {kv_dtype} | {engine.pool.page_bytes[0]} | {right} of {len(asked)} | {loss:.5f} "
            f"| {error:.5f} | {largest:.4f} |"
        )


if __name__ == "__main__":
    main()
