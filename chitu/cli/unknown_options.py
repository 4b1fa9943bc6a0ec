"""What an unknown option of a command was probably meant to be: one of its own, or a key of the topology. Pure.

Called by `commands.py` for a command line that argparse refuses. The options of other engines are known by name, since
users try them first; here most of them are keys of the topology.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from chitu.config.key_paths import known_keys

INSTANCES = "dp_config.router.{prefill,decode}_schedulers.K"
PD = "dp_config.router.pd_disaggregation"
KEYS = {
    "block_size": "cache.page_size",
    "chunked_prefill_size": "scheduler.chunk_size",
    "context_length": "model.max_model_len",
    "device": f"{INSTANCES}.devices",
    "devices": f"{INSTANCES}.devices",
    "disable_radix_cache": "cache.prefix_cache=off",
    "disaggregation_bootstrap_port": f"{PD}.bootstrap_port",
    "disaggregation_ib_device": f"{PD}.ib_device",
    "disaggregation_transfer_backend": f"{PD}.transport",
    "enable_prefix_caching": "cache.prefix_cache=on",
    "gpu_memory_utilization": "cache.memory_fraction",
    "kv_cache_dtype": "cache.kv_dtype",
    "log_level": "log.level",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_num_seqs": "scheduler.max_running_requests",
    "max_prefill_tokens": "scheduler.max_batched_tokens",
    "max_total_tokens": "cache.num_pages",
    "mem_fraction_static": "cache.memory_fraction",
    "no_enable_prefix_caching": "cache.prefix_cache=off",
    "num_gpu_blocks_override": "cache.num_pages",
    "otlp_traces_endpoint": "dp_config.router.otlp_endpoint",
    "schedule_policy": "dp_config.router.policy",
    "served_model_name": "model.served_name",
    "tensor_parallel": f"{INSTANCES}.tp_size",
    "tensor_parallel_size": f"{INSTANCES}.tp_size",
    "tp": f"{INSTANCES}.tp_size",
    "tp_size": f"{INSTANCES}.tp_size",
}
"""Keys of the topology by the names that options of other engines have."""
OPTIONS = {"model_path": "--model", "model_tag": "--model"}
"""Our options by such names."""


def unrecognized(argv: Sequence[str], rest: Sequence[str], options: Collection[str], takes_keys: bool) -> str:
    """Return the error for a command line of which argparse understood all but `rest`: what is unknown, and what was
    meant. `options`: those of the command. `takes_keys`: it takes keys of the topology."""
    option = next((word for word in rest if word.startswith("-")), "")
    name, has_value, value = option.partition("=")
    if option and not has_value:  # argparse has taken the word behind an option that it does not know for another one
        following = argv[argv.index(option) + 1 :]
        value = following[0] if following and not following[0].startswith("-") and "=" not in following[0] else ""
    shown = [
        f"{word} {value}" if word == option and value and not has_value else word for word in rest if word != value
    ]
    meaning = _meaning(name, value, options, _keys() if takes_keys else {}) if option else ""
    return f"unrecognized arguments: {' '.join(shown)}{meaning}"


def _meaning(name: str, value: str, options: Collection[str], keys: Mapping[str, str]) -> str:
    word = name.lstrip("-").replace("-", "_")
    if OPTIONS.get(word, "") in options:
        return f"; did you mean {OPTIONS[word]}?"
    near = [word] if word in keys else difflib.get_close_matches(name, options, n=1, cutoff=0.75)
    near = near or difflib.get_close_matches(word, keys, n=1, cutoff=0.85)
    near = near or [key for key in keys if key.startswith(f"{word}_")][:1]
    if not near:
        return "; a key of the topology is given as a.b=c (docs/configuration.md)" if keys else ""
    if near[0] in options:
        return f"; did you mean {near[0]}?"
    key = keys[near[0]]
    example = key if "=" in key else f"{key}={value or 'VALUE'}"
    if INSTANCES not in key:
        return f"; the topology has it: {example}"
    each = [example.replace(INSTANCES, f"dp_config.router.{role}_schedulers.0") for role in ("prefill", "decode")]
    return f"; each instance of the topology has it: {' '.join(each)}"


def _keys() -> dict[str, str]:
    """Return the keys of the topology by their last part and by the names of others."""
    return {path.rpartition(".")[2]: path for path in reversed(list(known_keys()))} | KEYS
