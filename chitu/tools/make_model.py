"""`make_model`: makes a small random model with its tokenizer, so that everything can be tried without a download.

Called by the `chitu make-model` command and by tests. Writes a Hugging Face checkpoint folder that transformers can
load, without importing transformers or torch. The folder appears complete or not at all (written under a temporary
name, then renamed). The same arguments give the same weights.

The weights are scaled so that a random model is useful for tests: logits are spread (near-ties are rare, so two
implementations that differ by rounding choose the same token), the text depends on the whole context instead of
repeating one token, and special tokens are rarely generated, so that greedy generation runs to its token limit.
Matrices have gain 1 (std 1 / sqrt(inputs)), so a layer adds about as much to the residual stream as the embedding
holds. Norm weights vary around 1, so that an omitted norm changes the output.

The tokenizer is a byte-level BPE trained on generated text: any text can be encoded (256 byte tokens), and the special
tokens come first. A `vocab_size` above what the text has pairs to merge leaves the last ids without a token.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from chitu.errors import ConfigError
from chitu.tools.make_vision import (
    TEXT_FAMILIES,
    VISION_FAMILIES,
    check_tower,
    nested,
    special_tokens,
    tower_tensors,
    vision_config,
    with_images,
    write_processor,
)

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
FAMILIES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Families of text models, each of which has code of our own. `make_vision.VISION_FAMILIES` are made, too."""
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
"""Families whose KV cache has one latent row per token."""
NUM_GROUPS = 2
"""Number of groups of experts in deepseek_v3; each token uses experts of one group."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtype names in config.json, with those in a safetensors header."""
LOGIT_STD = 3.0
"""Spread of the logits: the best two of 512 are then 0.9 apart on average, closer than 1e-4 once in 10000 tokens."""


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


def train_tokenizer(
    vocab_size: int, texts: Iterable[str] | None = None, specials: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
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
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(min(20000, 500 + vocab_size)) if texts is None else texts, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


Family = Literal["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_vl"]


@dataclass(slots=True, frozen=True)
class ModelShape:
    """Sizes of the model; the defaults make a few MB."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int | None = None
    """Size of a head; unset: `hidden_size / heads`."""
    intermediate_size: int | None = None
    """Size of the MLP; unset: 3 x `hidden_size`."""
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    tie: bool = False
    dtype: str = "float32"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling as in config.json, such as Llama 3's `{"rope_type": "llama3", ...}`."""
    experts: int = 8
    """Number of experts; this and the fields below are for families with experts and for DeepSeek."""
    experts_per_token: int = 2
    expert_size: int = 64
    q_lora_rank: int | None = 48
    """Rank of the q projection; None: q is projected in one step."""
    kv_lora_rank: int = 64
    rope_head_dim: int = 16
    nope_head_dim: int = 32
    v_head_dim: int = 24
    shards: int = 1
    """Number of safetensors files; more than one have an index."""
    tower_size: int = 64
    """Width of the vision tower; this and the fields below are for families with vision."""
    tower_depth: int = 3
    max_pixels: int = 512 * 512
    """Pixels of the largest image, 256 tokens; a larger one is made smaller."""

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.heads

    @property
    def resolved_intermediate_size(self) -> int:
        return self.intermediate_size or 3 * self.hidden_size

    def expert_layers(self, family: str) -> range:
        """Return the layers that have experts: in DeepSeek all but the first."""
        if family == "qwen3_moe":
            return range(self.layers)
        return range(1, self.layers) if family in LATENT_FAMILIES else range(0)

    def check(self, family: str) -> None:
        """Raise ConfigError if no such model can be made."""
        if family not in FAMILIES and family not in VISION_FAMILIES:
            raise ConfigError(f"model family {family!r} is none of {', '.join([*FAMILIES, *VISION_FAMILIES])}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        sizes = (self.layers, self.heads, self.kv_heads, self.hidden_size, self.max_position_embeddings, self.shards)
        if min(*sizes, self.head_dim or 1, self.intermediate_size or 1) < 1:
            raise ConfigError("every size of a model must be at least 1")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ConfigError(f"hidden_size {self.hidden_size} is no multiple of heads {self.heads}")
        if family == "qwen2" and self.resolved_head_dim * self.heads != self.hidden_size:
            raise ConfigError(f"qwen2 has head_dim hidden_size / heads, not {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.resolved_head_dim % 2:
            raise ConfigError(f"head_dim {self.resolved_head_dim} is odd, which RoPE cannot rotate")
        if self.expert_layers(family) and not 1 <= self.experts_per_token <= self.experts // NUM_GROUPS:
            raise ConfigError(f"{self.experts_per_token} experts a token, of {self.experts} in {NUM_GROUPS} groups")
        if family == "deepseek_v3" and (self.experts % NUM_GROUPS or self.experts < 2 * NUM_GROUPS):
            raise ConfigError(f"{self.experts} experts cannot be put into {NUM_GROUPS} groups of at least two")
        if family in LATENT_FAMILIES and (self.rope_head_dim % 2 or self.hidden_size % self.heads):
            raise ConfigError(f"rope_head_dim {self.rope_head_dim} is odd, or hidden_size no multiple of heads")
        if family in VISION_FAMILIES and self.resolved_head_dim < 8:
            raise ConfigError(f"head_dim {self.resolved_head_dim} is below 8: no part for each axis")
        if family in VISION_FAMILIES:
            check_tower(self)
        num_specials = len(special_tokens(family, SPECIAL_TOKENS))
        if self.vocab_size < 256 + num_specials:
            raise ConfigError(f"vocab_size {self.vocab_size} is less than {256 + num_specials}")


Array = NDArray[np.float32]


def tensors_of(family: str, shape: ModelShape, special_ids: list[int], seed: int) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of the checkpoint by its Hugging Face name, in a fixed order.

    Matrices have gain 1 (std 1 / sqrt(inputs)), so a layer adds about as much to the residual stream as the embedding
    holds. Norm weights vary around 1, so that an omitted norm changes the output.
    """
    drawn = _Tensors(TEXT_FAMILIES.get(family, family), shape, seed)
    if family not in VISION_FAMILIES:
        yield from drawn.all(special_ids)
        return
    yield from ((nested(name), values) for name, values in drawn.all(special_ids))
    yield from drawn.tower()


class _Tensors:
    """The tensors, drawn one after the other."""

    def __init__(self, family: str, shape: ModelShape, seed: int) -> None:
        self._family, self._shape = family, shape
        self._rng = np.random.default_rng(seed)
        self._hidden = shape.hidden_size
        # With tied embeddings a token's own row favours repeating it; stronger layers outweigh that.
        self._gain = 8.0 if shape.tie else 2.0

    def all(self, special_ids: list[int]) -> Iterator[tuple[str, Array]]:
        shape, hidden = self._shape, self._hidden
        # Rows of special tokens are scaled down, which gives logits near 0, so they are never the best.
        output_std = LOGIT_STD / math.sqrt(hidden)
        embedding = self._matrix(shape.vocab_size, hidden, output_std if shape.tie else 1.0)
        if shape.tie:
            embedding[special_ids] *= np.float32(0.1)
        yield "model.embed_tokens.weight", embedding
        attention = self._latent_attention if self._family in LATENT_FAMILIES else self._plain_attention
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", self._around(1.0, hidden)
            yield from attention(prefix)
            yield f"{prefix}.post_attention_layernorm.weight", self._around(1.0, hidden)
            if layer in shape.expert_layers(self._family):
                yield from self._experts(f"{prefix}.mlp")
            else:
                yield from self._mlp(f"{prefix}.mlp", shape.resolved_intermediate_size)
        yield "model.norm.weight", self._around(1.0, hidden)
        if not shape.tie:
            output = self._matrix(shape.vocab_size, hidden, output_std)
            output[special_ids] *= np.float32(0.1)
            yield "lm_head.weight", output

    def tower(self) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of the vision tower."""
        return tower_tensors(self._shape, self._matrix, self._around)

    def _matrix(self, rows: int, columns: int, std: float) -> Array:
        values = self._rng.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(std)
        return values

    def _around(self, mean: float, size: int) -> Array:
        return (mean + 0.1 * self._rng.standard_normal(size, dtype=np.float32)).astype(np.float32)

    def _plain_attention(self, prefix: str) -> Iterator[tuple[str, Array]]:
        shape, hidden, head_dim = self._shape, self._hidden, self._shape.resolved_head_dim
        query, key = shape.heads * head_dim, shape.kv_heads * head_dim
        for name, size in (("q", query), ("k", key), ("v", key)):
            yield f"{prefix}.self_attn.{name}_proj.weight", self._matrix(size, hidden, 1 / math.sqrt(hidden))
            if self._family == "qwen2":
                yield f"{prefix}.self_attn.{name}_proj.bias", self._around(0.0, size)
        if self._family in ("qwen3", "qwen3_moe"):
            yield f"{prefix}.self_attn.q_norm.weight", self._around(1.0, head_dim)
            yield f"{prefix}.self_attn.k_norm.weight", self._around(1.0, head_dim)
        yield f"{prefix}.self_attn.o_proj.weight", self._matrix(hidden, query, self._gain / math.sqrt(query))

    def _latent_attention(self, prefix: str) -> Iterator[tuple[str, Array]]:
        shape, hidden, matrix, around = self._shape, self._hidden, self._matrix, self._around
        heads, latent, values = shape.heads, shape.kv_lora_rank, shape.heads * shape.v_head_dim
        q_size, q_rank = heads * (shape.nope_head_dim + shape.rope_head_dim), shape.q_lora_rank
        if q_rank is None:
            yield f"{prefix}.self_attn.q_proj.weight", matrix(q_size, hidden, 1 / math.sqrt(hidden))
        else:
            yield f"{prefix}.self_attn.q_a_proj.weight", matrix(q_rank, hidden, 1 / math.sqrt(hidden))
            yield f"{prefix}.self_attn.q_a_layernorm.weight", around(1.0, q_rank)
            yield f"{prefix}.self_attn.q_b_proj.weight", matrix(q_size, q_rank, 1 / math.sqrt(q_rank))
        rows = latent + shape.rope_head_dim
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", matrix(rows, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", around(1.0, latent)
        rows = heads * (shape.nope_head_dim + shape.v_head_dim)
        yield f"{prefix}.self_attn.kv_b_proj.weight", matrix(rows, latent, 1 / math.sqrt(latent))
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, values, self._gain / math.sqrt(values))

    def _mlp(self, prefix: str, width: int) -> Iterator[tuple[str, Array]]:
        hidden = self._hidden
        yield f"{prefix}.gate_proj.weight", self._matrix(width, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.up_proj.weight", self._matrix(width, hidden, 1 / math.sqrt(hidden))
        yield f"{prefix}.down_proj.weight", self._matrix(hidden, width, self._gain / math.sqrt(width))

    def _experts(self, prefix: str) -> Iterator[tuple[str, Array]]:
        shape, hidden = self._shape, self._hidden
        yield f"{prefix}.gate.weight", self._matrix(shape.experts, hidden, 2 / math.sqrt(hidden))
        if self._family == "deepseek_v3":
            yield f"{prefix}.gate.e_score_correction_bias", self._around(0.0, shape.experts)
        for index in range(shape.experts):
            yield from self._mlp(f"{prefix}.experts.{index}", shape.expert_size)
        if self._family in LATENT_FAMILIES:
            yield from self._mlp(f"{prefix}.shared_experts", shape.expert_size)


def _encode(values: Array, dtype: str) -> bytes:
    """Return raw little-endian bytes in the checkpoint's dtype. bfloat16 rounds to nearest even."""
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return rounded.tobytes()


def save_safetensors(path: Path, tensors: dict[str, Array], dtype: str) -> None:
    """Write the safetensors format: length of the header (u64), JSON header, tensors one after the other.

    The library's own writer supports bfloat16 only with torch.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    encoded = {name: _encode(values, dtype) for name, values in tensors.items()}
    offset = 0
    for name, data in encoded.items():
        end = offset + len(data)
        header[name] = {"dtype": DTYPES[dtype], "shape": tensors[name].shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in encoded.values():
            file.write(data)


def make_model(
    directory: str | Path, family: str = "qwen3", shape: ModelShape | None = None, *, seed: int = 0, **sizes: Any
) -> Path:
    """Write a checkpoint into a new (or empty) folder and return it.

    `sizes` are fields of `ModelShape` that override those of `shape`. Raise ConfigError if the folder is not empty,
    the sizes do not fit together, or the seed is negative.
    """
    family = family.replace("-", "_")
    shape = replace(shape or ModelShape(), **sizes)
    shape.check(family)
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative")
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(work, family, shape, seed)
        os.chmod(work, 0o755)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _write(folder: Path, family: str, shape: ModelShape, seed: int) -> None:
    specials = special_tokens(family, SPECIAL_TOKENS)
    write_settings(folder, family, shape, train_tokenizer(shape.vocab_size, specials=specials))
    _write_weights(folder, family, shape, list(range(len(specials))), seed)


def write_settings(folder: Path, family: str, shape: ModelShape, tokenizer: Tokenizer) -> None:
    """Write every file of a checkpoint except its weights. The tokenizer is one of `train_tokenizer`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: token_id for token_id, token in enumerate(special_tokens(family, SPECIAL_TOKENS))}
    config, template = _config(TEXT_FAMILIES.get(family, family), shape, ids), CHAT_TEMPLATE
    if family in VISION_FAMILIES:
        config, template = vision_config(family, config, ids, shape), with_images(template)
        write_processor(folder, shape.max_pixels)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": ids[BOS], "eos_token_id": [ids[END_OF_TURN], ids[EOS]], "pad_token_id": ids[PAD]},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END_OF_TURN,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
            "chat_template": template,
        },
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(family: str, shape: ModelShape, ids: dict[str, int]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.resolved_intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "tie_word_embeddings": shape.tie,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[END_OF_TURN],
        "pad_token_id": ids[PAD],
    }
    if family != "qwen2" and family not in LATENT_FAMILIES:
        config["head_dim"] = shape.resolved_head_dim
    if family in ("llama", "qwen3", "qwen3_moe", *LATENT_FAMILIES):
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": shape.layers}
    if family in ("qwen3_moe", *LATENT_FAMILIES):
        config |= {"num_experts_per_tok": shape.experts_per_token, "moe_intermediate_size": shape.expert_size}
    if family == "qwen3_moe":
        config |= {"num_experts": shape.experts, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if family in LATENT_FAMILIES:
        config |= _deepseek_config(family, shape)
    return config


def _deepseek_config(family: str, shape: ModelShape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_rope_head_dim": shape.rope_head_dim,
        "qk_nope_head_dim": shape.nope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    }
    if family == "deepseek_v2":
        return config | {"topk_method": "greedy", "norm_topk_prob": False}
    return config | {"n_group": NUM_GROUPS, "topk_group": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0}


def _write_weights(folder: Path, family: str, shape: ModelShape, special_ids: list[int], seed: int) -> None:
    tensors = dict(tensors_of(family, shape, special_ids, seed))
    if shape.shards == 1:
        save_safetensors(folder / "model.safetensors", tensors, shape.dtype)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shape.shards):
        file = f"model-{shard + 1:05d}-of-{shape.shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard :: shape.shards]}
        save_safetensors(folder / file, part, shape.dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.size for values in tensors.values()) * (4 if shape.dtype == "float32" else 2)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
