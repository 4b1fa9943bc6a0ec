"""Fields of other servers that would change the tokens of an answer, and are refused by name wherever they are not
served: rows of the table of fields (`fields.py`). Pure.

A field that is unknown here is ignored with a warning, as other servers do. One of these is not: its client would get
another answer than it asked for. A field that is served under another name is refused with that name.
"""

from __future__ import annotations

from typing import Any

Row = tuple[str, str] | tuple[str, str, tuple[Any, ...]]
"""Name, note and, optionally, neutral values."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("n_predict", "num_predict", "max_new_tokens", "max_length", "max_tokens", "max_completion_tokens"),
            *("max_gen_len", "maxTokens", "max_output_tokens"),
        ),
        ("max_tokens", "max_output_tokens"),
    ),
    **dict.fromkeys(
        ("enable_thinking", "thinking", "think", "preserve_thinking"),
        ("enable_thinking", "chat_template_kwargs.enable_thinking"),
    ),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat"), ("repetition_penalty",)),
    **dict.fromkeys(("stop", "stop_sequences", "stop_strings"), ("stop", "stop_sequences")),
    **dict.fromkeys(("grammar", "gbnf"), ("guided_grammar",)),
    **dict.fromkeys(
        ("format", "response_schema", "response_format", "output_format"),
        ("response_format", "text.format", "output_config.format"),
    ),
    **dict.fromkeys(("reasoning", "reasoning_effort"), ("reasoning_effort", "reasoning.effort", "thinking")),
    **dict.fromkeys(("chat_template_args", "template_kwargs"), ("chat_template_kwargs",)),
    "temp": ("temperature",),
    "num_return_sequences": ("n",),
    "top_n_tokens": ("top_logprobs", "logprobs"),
    "min_length": ("min_tokens",),
    "random_seed": ("seed",),
    "truncate": ("truncate_prompt_tokens",),
    "messages": ("input",),
    "input": ("messages", "prompt"),
    "system": ("messages", "instructions"),
    "instructions": ("system", "messages"),
    "texts": ("documents",),
    "top_k": ("top_n",),
    "output_dimension": ("dimensions",),
}
"""Name of a field in other servers, or at other routes -> what it is called here, of which a route has at most one."""
NEUTRAL_OF_OTHER_NAMES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"), (-1,)),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat", "num_return_sequences"), (1,)),
    **dict.fromkeys(("stop", "stop_sequences", "stop_strings"), ([],)),
    **dict.fromkeys(("grammar", "gbnf", "format", "system"), ("",)),
    **dict.fromkeys(("chat_template_args", "template_kwargs", "reasoning"), ({},)),
    **dict.fromkeys(("top_n_tokens", "min_length"), (0,)),
    "truncate": (False, "NONE"),
}
"""Values, besides null, with which such a field asks for nothing."""
SAMPLERS: tuple[Row, ...] = (
    ("typical_p", "", (1, 0)),
    ("typical", "", (1, 0)),
    ("top_a", "", (0,)),
    ("top_n_sigma", "", (-1, 0)),
    ("nsigma", "", (0,)),
    ("tfs", "", (1,)),
    ("tfs_z", "", (1,)),
    ("epsilon_cutoff", "", (0,)),
    ("eta_cutoff", "", (0,)),
    ("mirostat", "", (0,)),
    ("mirostat_mode", "", (0,)),
    ("mirostat_tau", "", (5,)),
    ("mirostat_eta", "", (0.1,)),
    ("dry_multiplier", "", (0,)),
    ("dry_base", "", (1.75,)),
    ("dry_allowed_length", "", (2,)),
    ("dry_penalty_last_n", "", (-1, 0)),
    ("dry_range", "", (0,)),
    ("dry_sequence_breakers", "", ([], ["\n", ":", '"', "*"])),
    ("xtc_probability", "", (0,)),
    ("xtc_threshold", "", (0.1,)),
    ("dynamic_temperature", "", (False,)),
    ("dynatemp_range", "", (0,)),
    ("dynatemp_exponent", "", (1,)),
    ("dynatemp_low", ""),
    ("dynatemp_high", ""),
    ("smoothing_factor", "", (0,)),
    ("smoothing_curve", "", (1,)),
    ("temperature_last", "", (False,)),
    ("samplers", "the order of samplers is fixed", ([],)),
    ("sampler_priority", "the order of samplers is fixed", ([],)),
    ("sampler_order", "the order of samplers is fixed", ([],)),
    ("repeat_last_n", "penalties are over all tokens", (-1,)),
    ("penalty_last_n", "penalties are over all tokens", (-1,)),
    ("repetition_penalty_range", "penalties are over all tokens", (0,)),
    ("presence_penalty_range", "penalties are over all tokens", (0,)),
    ("encoder_repetition_penalty", "", (1,)),
    ("no_repeat_ngram_size", "", (0,)),
    ("repetition_detection", ""),
    ("penalty_alpha", "", (0,)),
    ("penalize_nl", "", (True,)),
    ("do_sample", "`temperature: 0` is greedy", (True,)),
    ("num_beams", "", (1,)),
    ("use_beam_search", "", (False,)),
    ("length_penalty", "", (1,)),
    ("diversity_penalty", "", (0,)),
    ("early_stopping", "", (False,)),
    ("guidance_scale", "", (1,)),
    ("cfg_scale", "", (1,)),
    ("negative_prompt", "", ("",)),
    ("watermark", "", (False,)),
    ("token_healing", "", (False,)),
    ("ban_eos_token", "see `ignore_eos`", (False,)),
    ("add_bos_token", "see `add_special_tokens`"),
    ("banned_tokens", "see `bad_words`", ([],)),
    ("custom_token_bans", "see `bad_words`", ("",)),
    ("banned_strings", "see `bad_words`", ([],)),
    ("logits_processors", "", ([],)),
    ("logits_processor_pattern", ""),
    ("custom_logit_processor", ""),
    ("lora", "an adapter is a `model`", ([],)),
    ("lora_path", "an adapter is a `model`"),
    ("lora_request", "an adapter is a `model`"),
    ("adapter_id", "an adapter is a `model`"),
    ("options", "Ollama's: give each of them at the top", ({},)),
    ("safe_prompt", "", (False,)),
    ("thinking_budget", ""),
    ("thinking_token_budget", ""),
    ("reasoning_budget", "", (-1,)),
    ("transforms", "", ([],)),
)
"""Of sampling, in vLLM, SGLang, TGI, llama.cpp, Ollama and others."""
OF_CHATS: tuple[Row, ...] = (
    ("n", "chat has it", (1,)),
    ("seed", "chat has it"),
    ("presence_penalty", "chat has it", (0,)),
    ("frequency_penalty", "chat has it", (0,)),
    ("repetition_penalty", "chat has it", (1,)),
    ("logit_bias", "chat has it", ({},)),
    ("min_p", "chat has it", (0,)),
    ("min_tokens", "chat has it", (0,)),
    ("stop_token_ids", "chat has it", ([],)),
    ("allowed_token_ids", "chat has it"),
    ("bad_words", "chat has it", ([],)),
    ("ignore_eos", "chat has it", (False,)),
    ("structured_outputs", "chat has it"),
    ("guided_json", "chat has it"),
    ("guided_regex", "chat has it"),
    ("guided_choice", "chat has it"),
    ("guided_grammar", "chat has it"),
    ("truncate_prompt_tokens", "chat has it"),
)
"""What chats serve, and other routes that generate do not."""
UNUSED: tuple[Row, ...] = (
    ("num_ctx", "the context is that of the server"),
    ("keep_alive", "the model stays loaded"),
)
"""Fields without effect of other servers: the tokens do not depend on them."""
