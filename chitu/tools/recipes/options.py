"""What options of SGLang, vLLM and TensorRT-LLM mean in a topology here. Pure.

Every option of a recipe is a *fact* of the plan (ranks, drafts), a *key* of the topology, to be done *by hand*, *left
out* (nothing here corresponds, and it changes no answer), *refused*, or unknown. All but facts and keys are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chitu.errors import ConfigError
from chitu.tools.recipes.recipe import Side

KEYS = {
    "served_model_name": "model.served_name",
    "max_model_len": "model.max_model_len",
    "context_length": "model.max_model_len",
    "max_seq_len": "model.max_model_len",
    "page_size": "cache.page_size",
    "tokens_per_block": "cache.page_size",
    "kv_block_size": "cache.page_size",
    "hicache_size": "cache.host_bytes",
    "block_size": "cache.page_size",
    "kv_cache_dtype": "cache.kv_dtype",
    "mem_fraction_static": "memory_fraction",
    "gpu_memory_utilization": "memory_fraction",
    "free_gpu_memory_fraction": "memory_fraction",
    "max_running_requests": "scheduler.max_running_requests",
    "max_num_seqs": "scheduler.max_running_requests",
    "max_batch_size": "scheduler.max_running_requests",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_num_tokens": "scheduler.max_batched_tokens",
    "max_prefill_tokens": "scheduler.max_batched_tokens",
    "chunked_prefill_size": "scheduler.chunk_size",
    "disaggregation_transfer_backend": "transport",
    "disable_radix_cache": "cache.prefix_cache",
    "no_enable_prefix_caching": "cache.prefix_cache",
    "enable_prefix_caching": "cache.prefix_cache",
    "enable_block_reuse": "cache.prefix_cache",
}
"""Options that are keys. `memory_fraction` is one of each instance, `transport` of `pd_disaggregation`."""
_FACTS = (
    "tp tp_size tensor_parallel_size dp dp_size data_parallel_size pp pp_size pipeline_parallel_size ep ep_size "
    "expert_parallel_size moe_expert_parallel_size enable_dp_attention enable_attention_dp enable_expert_parallel "
    "moe_a2a_backend speculative_algorithm speculative_algo speculative_num_steps speculative_num_draft_tokens "
    "speculative_eagle_topk speculative_draft_model_path speculative_config decoding_type num_nextn_predict_layers "
    "model model_path quantization disaggregation_mode is_prefill_worker is_decode_worker kv_transfer_config "
    "data_parallel_size_local"
)
FACTS = frozenset(_FACTS.split())
"""Options of the plan."""
LEFT_OUT = {
    "kernels and overlap, which are chosen here": (
        r"attention_backend|(nsa|dsa)_.*_backend|disable_overlap_schedule|enforce_shared_experts_fusion"
        r"|num_continuous_decode_steps|speculative_attention_mode"
        r"|moe_tensor_parallel_size|.*moe_runner_backend|.*gemm_(backend|config)|moe_(config|backend|dense_tp_size)"
        r"|.*cuda_?graph.*|enforce_eager|compilation_config|disable_flashinfer_autotune|no_enable_flashinfer_autotune"
        r"|enable_flashinfer_allreduce_fusion|allreduce_strategy|enable_symm_mem|.*single_batch_overlap|enable_dbo"
        r"|dbo_.*|disable_overlap_scheduler|(no_)?async_scheduling|deepep_(mode|config)|all2all_backend|linear_attn_.*"
        r"|enable_dp_lm_head|enable_lm_head_tp_in_adp|attention_dp_config|backend|disable_shared_experts_fusion"
        r"|.*moe_a2a_backend|mamba_.*|swa_full_tokens_ratio|max_mamba_cache_size|scheduler_recv_interval|numa_bind"
        r"|disable_chunked_prefix_cache|enable_chunked_prefill|enable_dynamic_chunking|long_prefill_token_threshold"
        r"|(no_)?disable_hybrid_kv_cache_manager|attention_config|enable_ep_weight_filter|enable_cumem_allocator"
    ),
    "copies of busy experts, which are not made here": r"eplb.*|enable_eplb|ep_num_redundant_experts|ep_dispatch_.*",
    "reports and logs": (
        r"uvicorn_.*|print_iter_log|enable_iter_.*_stats|enable_metrics|decode_log_interval|log_level|disable_log_requests"
        r"|disable_access_log_for_endpoints|otlp_.*|kv_events_config|publish_events_and_metrics|(no_)?enable_log_requests"
    ),
    "processes, addresses and deadlines of that engine": (
        r"host|port|nnodes|node_rank|dist_init_addr|watchdog_timeout|stream_interval|disaggregation_bootstrap_port|.*polling_interval|data_parallel_.*"
        r"|num_postprocess_workers|cache_transceiver_config|skip_tokenizer_init|gpus_per_node|api_server_count"
        r"|extra_engine_args|kv_cache_memory_bytes|enable_sleep_mode|dyn_.*|router_mode|http_port|request_plane|prefix_cache_retention_interval"
    ),
    "how it spreads requests; the router does": r"load_balance_method|prefill_round_robin_balance|schedule_policy",
    "what a model's folder says here": (
        r"trust_remote_code|tokenizer_mode|tokenizer|revision|tool_call_parser|reasoning_parser|enable_auto_tool_choice"
        r"|enable_multimodal|language_model_only|chat_template|dtype"
    ),
    "how it reads the weights": r"weight_loader_.*|model_loader_extra_config|load_format|download_dir",
    "memory that is derived here": r"max_total_tokens|num_reserved_decode_tokens|num_gpu_blocks_override",
}
"""Options that have no counterpart and change no answer, by the reason that is given."""
REFUSED = {
    "enable_prefill_cp": "context parallelism",
    "offload_group_size": "weights in host memory that are moved for each step",
    "prefill_context_parallel_size": "context parallelism",
    "decode_context_parallel_size": "context parallelism",
}
"""Options that change what is computed or whether it fits, and that nothing here can do."""
KEPT_WITH = (
    "offload_num_in_group",
    "offload_prefetch_step",
    "cp_strategy",
    "enable_hierarchical_cache",
    "config",
    "kv_cache_config",
)
"""Further options of others."""
BY_HAND = ("json_model_override_args", "hf_overrides")
"""Changes of config.json, which is read from the folder here."""
TRANSPORTS = {"nixl": "nixl", "mooncake": "mooncake"}
DRAFTS = {"mtp": "mtp", "eagle": "mtp", "nextn": "mtp", "deepseek_mtp": "mtp", "ngram": "text", "suffix": "text"}
"""Methods that draft here: `mtp` needs a layer of the checkpoint, which SGLang calls EAGLE for these models."""


@dataclass(slots=True)
class SideWords:
    """What was found in the options of one side."""

    engine: str
    side: Side
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of the topology."""
    drafts: str = ""
    model: str = ""
    quantization: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    """Option and the reason why nothing here has it."""
    refused: dict[str, str] = field(default_factory=dict)
    by_hand: dict[str, str] = field(default_factory=dict)
    """Option and the change of config.json that it stands for."""
    unknown: dict[str, Any] = field(default_factory=dict)


def plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").replace(".", "_")


def read_options(engine: str, options: Mapping[str, Any], count: int) -> SideWords:
    """Return what the options of one side mean. `engine`: sglang, vllm or trtllm. `count`: number of its instances."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if plain(name) == "kv_cache_config" and isinstance(value, Mapping):
            flat |= {plain(key): inner for key, inner in value.items()}
            if "dtype" in value:
                flat["kv_cache_dtype"] = flat.pop("dtype")
        flat[plain(name)] = value
    words = SideWords(engine, _side(engine, flat, count))
    words.drafts = _drafts(flat)
    words.model = str(flat.get("served_model_name") or flat.get("model") or flat.get("model_path") or "")
    words.quantization = str(flat.get("quantization") or "")
    for name, value in flat.items():
        if name in KEYS:
            _take_key(words, name, value)
        elif name in BY_HAND:
            words.by_hand[name] = value if isinstance(value, str) else json.dumps(value)
        elif name in REFUSED:
            words.refused[name] = REFUSED[name]
        elif name in FACTS or name in KEPT_WITH:
            continue
        elif reason := next((reason for reason, names in LEFT_OUT.items() if re.fullmatch(names, name)), ""):
            words.left_out[name] = reason
        else:
            words.unknown[name] = value
    return words


def _take_key(words: SideWords, name: str, value: Any) -> None:
    try:
        _take(words, KEYS[name], name, value)
    except (TypeError, ValueError):  # such as a variable that the recipe leaves open
        words.unknown[name] = value


def _take(words: SideWords, key: str, name: str, value: Any) -> None:
    if key == "cache.prefix_cache":
        words.keys[key] = bool(value) if name.startswith("enable") else not value
    elif key == "cache.kv_dtype":
        if str(value) in ("fp8", "fp8_e4m3"):
            words.keys[key] = "fp8_e4m3"
        elif str(value) not in ("auto", "bfloat16", "bf16"):
            words.left_out[name] = f"{value} is no dtype of the cache here; it has the model's"
    elif key == "scheduler.max_running_requests" and words.engine == "sglang":
        words.keys[key] = max(1, int(value) // words.side.dp)  # SGLang's is of all data ranks together
    elif key == "transport":
        if str(value) in TRANSPORTS:
            words.keys[key] = TRANSPORTS[str(value)]
        else:
            words.refused[name] = f"no transport here is called {value}"
    elif name == "chunked_prefill_size" and int(value) <= 0:
        words.left_out[name] = "prompts are computed whole; here they are computed in chunks"
    elif key == "cache.host_bytes":
        words.keys[key] = int(float(value) * 1e9)
    elif key != "model.served_name":
        words.keys[key] = float(value) if key == "memory_fraction" else int(value)


def _number(flat: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if flat.get(name) is not None:
            try:
                return int(flat[name])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name} is {flat[name]!r}, which is no number") from error
    return 1


def _side(engine: str, flat: Mapping[str, Any], count: int) -> Side:
    tp = _number(flat, "tensor_parallel_size", "tp_size", "tp")
    dp = _number(flat, "data_parallel_size", "dp_size", "dp")
    pp = _number(flat, "pipeline_parallel_size", "pp_size", "pp")
    ep = _number(flat, "expert_parallel_size", "ep_size", "ep", "moe_expert_parallel_size")
    is_spread = ep > 1 or bool(flat.get("enable_expert_parallel")) or flat.get("moe_a2a_backend") not in (None, "none")
    if engine == "trtllm":
        tp, dp = (1, tp) if flat.get("enable_attention_dp") else (tp, 1)
    elif engine == "sglang" and flat.get("enable_dp_attention"):
        tp = max(1, tp // dp)
    elif engine == "sglang":
        count, dp = count * dp, 1  # copies of the whole model behind one port
    return Side(count, tp, dp, pp, "spread" if is_spread else "cut")


def _drafts(flat: Mapping[str, Any]) -> str:
    """Return method and number of draft tokens; empty if the recipe drafts nothing."""
    config = flat.get("speculative_config") or {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise ConfigError(f"speculative_config is no JSON: {config}") from error
    method = config.get("method") or config.get("decoding_type") or flat.get("speculative_algorithm")
    method = method or flat.get("speculative_algo") or ("draft model" if config else "")
    if not method:
        return ""
    number = config.get("num_speculative_tokens") or config.get("num_nextn_predict_layers")
    number = number or config.get("max_draft_len") or flat.get("speculative_num_steps") or 1
    beside = config.get("model") or config.get("speculative_model_dir") or flat.get("speculative_draft_model_path")
    if beside:
        method = f"{method} heads beside it"
    return f"{str(method).lower()} {number}"
