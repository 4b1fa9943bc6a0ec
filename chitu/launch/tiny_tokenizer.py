"""Tokenizer of a generated model: byte-level BPE trained on generated text. Used by `make_model` and by the training of
chitu-tiny.

Any text can be encoded (256 byte tokens), the special tokens come first, and the vocabulary is as large as the text
has pairs to merge; a larger `vocab_size` leaves the last ids of the model without a token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS = "<|begin|>"
EOS = "<|endoftext|>"
PAD = "<|pad|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, START_OF_TURN, END_OF_TURN)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- '<|im_start|>system\\nTools, one JSON object a line:\\n' }}
{%- for tool in tools %}
{{- tool | tojson + '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' + message.role | string) }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pattern to split text into words. transformers gives a `qwen2` checkpoint this pattern and the NFC normaliser,
whatever its tokenizer.json has."""

_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did many off before must well back through years much where your way down should "
    "because long each just state those people too how little good make very own see men work here get both between "
    "life being under never day same another know while last might great year since against go come right used take "
    "cache page token prefill decode router request model memory network layer head batch queue"
)
_SYLLABLES = "ka lo mi ra ten sur vel nor da pri quo ist ber fal gen hul jor wex yan zem cro plu stra thi"


def _sentences(count: int) -> Iterator[str]:
    """Yield English-like text with a Zipf law over common words, invented words and numbers; always the same."""
    rng = random.Random(20)
    words = _WORDS.split()
    weights = [1 / (rank + 3) for rank in range(len(words))]
    syllables = _SYLLABLES.split()
    for _ in range(count):
        chosen = rng.choices(words, weights, k=rng.randrange(5, 14))
        if rng.random() < 0.8:
            chosen.insert(rng.randrange(len(chosen)), "".join(rng.choices(syllables, k=rng.randrange(2, 5))))
        if rng.random() < 0.2:
            chosen.append(str(rng.randrange(10000)))
        yield " ".join(chosen).capitalize() + rng.choice([".", ".", "?", "!", ",\n"])


def train_tokenizer(vocab_size: int, texts: Iterable[str] | None = None) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens (at least 256 and the special ones) on `texts` (None: generated
    English). Encoding a text adds the bos token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(min(20000, 500 + vocab_size)) if texts is None else texts, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer
