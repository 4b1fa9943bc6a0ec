"""Tiny random checkpoints of every family, written by `transformers`, and a driver that runs plans like a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import transformers

from chitu.engine.build import load_model
from chitu.engine.executor import Admit, PrefillChunk, StepPlan
from chitu.engine.expert_group import ExpertGroup
from chitu.engine.image_features import image_table
from chitu.engine.memory_budget import kv_layout
from chitu.engine.model_runner import ModelRunner
from chitu.engine.sampler import Sampler
from chitu.engine.step_graphs import Recording
from chitu.kv_cache.pool import KVPool
from chitu.models.adapters import hashes_of, read_adapters
from chitu.models.config import Code, model_hash, read_model_spec
from chitu.models.draft_layer import with_draft_layer
from chitu.models.window_state import with_window_state
from chitu.ops.interface import Ops
from chitu.protocol import SamplingParams, pack_i32

PAGE_SIZE = 16
VOCAB_SIZE = 500
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
    "original_max_position_embeddings": 64,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"head_dim": 32}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "deepseek_v2": (
        "DeepseekV2",
        {**EXPERTS, **LATENT, "q_lora_rank": None, "rope_scaling": YARN, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {**EXPERTS, **LATENT, "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**EXPERTS, **LATENT, "q_lora_rank": 48, "n_group": 2, "topk_group": 1, "rope_scaling": YARN},
    ),
    "deepseek_v3_biases": (
        "DeepseekV3",
        {**EXPERTS, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}, **EXPERTS, "q_lora_rank": 48},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **EXPERTS,
            **LATENT,
            "q_lora_rank": 48,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 20,
            "index_head_dim": 24,
            "index_n_heads": 16,
            "index_topk_freq": 2,  # layers with an index, without one, with one
            "index_skip_topk_offset": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "swiglu_alpha": 1.4,
            "swiglu_limit": 0.8,  # which gates and ups of random weights exceed
            "rope_parameters": {**YARN, "truncate": False, "rope_theta": 5000.0},
        },
    ),
    "qwen3_moe_sparse": ("Qwen3Moe", {**EXPERTS, "num_experts": 5, "norm_topk_prob": False, "decoder_sparse_step": 2}),
}


def write_checkpoint(folder: Path, family: str, num_layers: int = 3, **save: Any) -> transformers.PreTrainedModel:
    """Write a random float32 model. Biases and norms are random too, so that omitting one shows."""
    prefix, extra = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        **{"head_dim": 32, "num_key_value_heads": 2, **extra},
    )
    torch.manual_seed(sum(family.encode()))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.12)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder, **save)
    return model


def expected_tokens(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the greedy continuation by `transformers`, ignoring eos."""
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        tokens = [int(out.logits[0, -1].argmax())]
        while len(tokens) < count:
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


def make_prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(1000 * seed + length)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


class GreedySampler:
    """Takes the argmax and records admissions: these tests cover logits, not sampling."""

    def __init__(self) -> None:
        self.admitted: dict[int, tuple[torch.Tensor, int]] = {}
        """Token ids and prompt length by slot. Token ids stay on their device: an admission must not wait for it."""

    def admit(
        self, slot: int, token_ids: torch.Tensor, prompt_len: int, params: SamplingParams, numbers: None = None
    ) -> None:
        assert slot not in self.admitted
        self.admitted[slot] = token_ids, prompt_len

    def release(self, slot: int) -> None:
        del self.admitted[slot]

    def numbers_of(self, params: SamplingParams, num_tokens: int, prompt_len: int) -> list[int]:
        return []

    def drawn_slot(self, slot: int, params: SamplingParams | None = None) -> int:
        return -1

    def is_greedy(self, slots: list[int]) -> bool:
        return all(slot in self.admitted for slot in slots)

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        assert logits.dtype == torch.float32
        assert all(slot in self.admitted for slot in slots)
        return logits.argmax(-1)

    def take_failures(self) -> dict[int, str]:
        return {}


class Engine:
    """A `ModelRunner` with page bookkeeping; pages are handed out in random order."""

    def __init__(
        self,
        path: Path,
        *,
        num_pages: int = 256,
        num_slots: int = 8,
        max_model_len: int = 1024,
        dtype: str = "float32",
        kv_dtype: str | None = None,
        ops: Ops | None = None,
        sampling: bool = True,
        device: str = "cpu",
        recording: Recording | None = None,
        sampler: Sampler | None = None,
        code: Code = "auto",
        adapters: Mapping[str, str] = MappingProxyType({}),
        plant: Callable[[Any], Any] = lambda model: model,
        window_state: bool = False,
        drafts: bool = False,
        mtp_tokens: int = 1,
        experts: ExpertGroup | None = None,
        checks_rows: bool = False,
        greedy: Any = None,
        image_rows: int = 0,
    ) -> None:
        """Load the model. `sampler` replaces argmax; `kv_dtype` is the dtype of the pages, by default the model's.
        `adapters`: folders of LoRA adapters by name. `plant` puts a fault into the model. `window_state` as in
        `CacheConfig`. `drafts`: with the layer that drafts, so many tokens in a row. `experts`: with its part of spread
        experts. `image_rows`: rows for features of images; with none only the text part is loaded."""
        self.spec = with_window_state(read_model_spec(path, max_model_len, code), window_state)
        self.spec = with_draft_layer(self.spec, drafts)
        loaded = read_adapters(adapters, self.spec, path)
        model = plant(
            load_model(
                path,
                dtype,
                device,
                max_model_len=max_model_len,
                ops=ops,
                code=code,
                adapters=loaded,
                window_state=window_state,
                drafts=drafts,
                spread=experts,
                images=image_rows > 0,
            )
        )
        layout = kv_layout(self.spec, PAGE_SIZE, kv_dtype or dtype, 1, model_hash(path, self.spec.code), dtype)
        layout = msgspec.structs.replace(layout, adapters=hashes_of(loaded))
        has_scratch = recording is not None
        self.pool = KVPool(layout, num_pages, 8, device, has_scratch=has_scratch, num_state_slots=num_slots + 1)
        self._num_state_slots = self.pool.num_state_slots
        self.sampler = GreedySampler()
        self.runner = ModelRunner(
            self.spec,
            model,
            self.pool,
            num_slots,
            max_model_len,
            (sampler or self.sampler) if sampling else None,
            recording,
            mtp_tokens=mtp_tokens,
            experts=experts,
            checks_rows=checks_rows,
            greedy=greedy,
            images=image_table(model, image_rows, self.pool.device),
        )
        self._free = list(range(num_pages))
        random.Random(7).shuffle(self._free)
        self.chosen: Mapping[int, int] = {}
        """Number of the LoRA adapter of each slot that has one."""

    def pages(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range((num_tokens + PAGE_SIZE - 1) // PAGE_SIZE))

    def admit(self, slot: int, tokens: list[int], total: int, **fields: Any) -> Admit:
        """Return an admission with room for `total` tokens from the start. Its state row, if the model has state, has
        another number than the slot."""
        sampling = fields.pop("sampling", GREEDY)
        prompt_len, kv_len = fields.pop("prompt_len", len(tokens)), fields.pop("kv_len", 0)
        adapter = fields.pop("adapter", self.chosen.get(slot, 0))
        pages = self.pages(total)
        return Admit(slot, pack_i32(tokens), prompt_len, kv_len, pages, sampling, self.state_slot(slot), adapter)

    def state_slot(self, slot: int) -> int:
        return (slot + 3) % self._num_state_slots if self._num_state_slots else -1


def chunks_of(slot: int, length: int, size: int, **last: Any) -> Iterable[PrefillChunk]:
    """Yield a prompt as chunks of at most `size`; the final one gets the fields `last`."""
    for start in range(0, length, size):
        end = min(start + size, length)
        yield PrefillChunk(slot, start, end - start, **(last if end == length else {}))


def generate(engine: Engine, prompts: list[list[int]], count: int, chunk_size: int = 37) -> list[list[int]]:
    """Run all prompts at once: in every step each sequence takes its next chunk or its next decode step."""
    outputs: list[list[int]] = [[] for _ in prompts]
    pending = {slot: list(chunks_of(slot, len(prompt), chunk_size, sample=True)) for slot, prompt in enumerate(prompts)}
    admit = [engine.admit(slot, prompt, len(prompt) + count) for slot, prompt in enumerate(prompts)]
    while any(len(output) < count for output in outputs):
        plan = StepPlan(
            admit=admit,
            prefill=[chunks.pop(0) for chunks in pending.values() if chunks],
            decode=[slot for slot, output in enumerate(outputs) if 0 < len(output) < count],
        )
        admit = []
        result = engine.runner.execute(plan)
        for slot, token in zip(result.slots, result.tokens, strict=True):
            outputs[slot].append(token)
    engine.runner.execute(StepPlan(release=list(range(len(prompts)))))
    return outputs


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    """Return the logits of two prompts' last tokens, in chunks and in one batch.
    `options`: of `Engine`."""
    sampler, prompts = Recorder(), [make_prompt(5), make_prompt(50)]
    engine = Engine(folder, num_pages=16, num_slots=2, max_model_len=128, sampler=sampler, **options)
    admit = [engine.admit(slot, prompt, len(prompt), sampling=GREEDY) for slot, prompt in enumerate(prompts)]
    engine.runner.execute(StepPlan(admit=admit, prefill=[PrefillChunk(1, 0, 23)]))
    last = [PrefillChunk(0, 0, 5, sample=True), PrefillChunk(1, 23, 27, sample=True)]
    engine.runner.execute(StepPlan(prefill=last))
    return sampler.logits


class Recorder(GreedySampler):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
        self.logits = logits.clone()
        return super().sample(logits, slots)
