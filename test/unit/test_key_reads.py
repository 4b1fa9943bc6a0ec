"""Unknown keys of config.json: accepted with a word if the installed transformers never reads them, else refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import PUBLISHED, ROWS

from chitu.errors import ConfigError
from chitu.models.config import read_model_spec
from chitu.models.config_parts import ROPE_TYPES
from chitu.models.generic.key_reads import keys_read

OWN = {PUBLISHED[row.name]["architectures"][0]: row.name for row in ROWS if row.code == "own" and not row.refused}
"""Architecture of our own code -> a published config of it."""
FOUND: dict[str, Any] = {
    "_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "unk_token_id": 0,
    "model_name": "my-finetune",
    "neftune_noise_alpha": 5.0,
    "attn_implementation": "flash_attention_2",
    "_attn_implementation": "sdpa",
    "flash_attn": True,
    "use_flash_attention_2": None,
    "keys_to_ignore_at_inference": ["past_key_values"],
    "gradient_checkpointing": False,
    "hidden_dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token": "<s>",
    "seq_length": 2048,
    "mergekit": [{"a": 1}],
    "lora_config": {"r": 8},
}
"""Keys of real folders, which change no token."""
READ: dict[str, Any] = {
    "is_causal": False,
    "attention_chunk_size": 64,
    "per_layer_config": {"0": {"intermediate_size": 8}},
    "kv_sharing_modes": ["reuse"],
    "attribute_map": {"hidden_size": "intermediate_size"},
    "get_text_config": 1,
    "__class__": "x",
    "decoder": {},
    "hidden_activation": "gelu",
    "min_p": 0.5,
    "cache_implementation": "quantized",
    "base_model_tp_plan": {},
    "attn_implementation": "paged|eager",
}
"""Keys that the code of all models reads."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("architecture", OWN)
def test_keys_that_nothing_reads_are_accepted_with_one_line_that_names_them(architecture, tmp_path, caplog):
    config = PUBLISHED[OWN[architecture]]
    known = read_model_spec(write(tmp_path, config))
    assert not caplog.records
    assert read_model_spec(write(tmp_path, {**config, **FOUND})) == known
    (line,) = [record.getMessage() for record in caplog.records]
    for key in ("_model_name_or_path", "unk_token_id", "model_name", "neftune_noise_alpha", "flash_attn", "mergekit"):
        assert f"'{key}'" in line
    assert "config.json: these keys are ignored, since transformers" in line
    assert "nearest" not in line
    assert "'gradient_checkpointing'" not in line, "known to have no effect"


@pytest.mark.parametrize(
    ("architecture", "key"), [*(("LlamaForCausalLM", key) for key in READ), *((each, "is_causal") for each in OWN)]
)
def test_a_key_that_the_library_reads_and_that_is_not_known_here_is_refused_by_name(
    architecture, key, tmp_path, caplog
):
    config = {**PUBLISHED[OWN[architecture]], "_model_name_or_path": "x", key: READ[key]}
    with pytest.raises(ConfigError, match=rf"{key}'? .*(is not known|is not supported|multimodal)"):
        read_model_spec(write(tmp_path, config))
    assert not caplog.records, "nothing is accepted of a folder that is refused"


def test_keys_that_are_only_of_other_models_or_misspelled_are_ignored_as_transformers_does(tmp_path, caplog):
    llama = PUBLISHED[OWN["LlamaForCausalLM"]]
    keys = {"dual_chunk_attention_config": {}, "rope_tetha": 5e5, "final_logit_softcapping": 30.0, "é.x y": 1}
    read_model_spec(write(tmp_path, {**llama, **keys}))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'rope_tetha' (the nearest known one is 'rope_theta')" in line, "which shows what was meant"
    assert all(repr(key) in line for key in keys)


def test_a_key_of_the_rope_is_ignored_only_if_no_rope_reads_it(tmp_path, caplog):
    llama = {key: value for key, value in PUBLISHED[OWN["LlamaForCausalLM"]].items() if not key.startswith("rope_")}
    linear = {"rope_type": "linear", "factor": 2.0}
    read_model_spec(
        write(tmp_path, {**llama, "rope_scaling": {**linear, "extrapolation_factor": 1.0}, "flash_attn": 1})
    )
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'flash_attn'" in line and "'extrapolation_factor'" in line
    read = {key for keys in ROPE_TYPES.values() for key in keys if key not in linear} | {"long_factor", "short_factor"}
    for key in read - {"attn_factor"}:
        with pytest.raises(ConfigError, match=f"'{key}' is not known"):
            read_model_spec(write(tmp_path, {**llama, "rope_scaling": {**linear, key: 1.0}}))


SHARED = """
import copy
_NAMES = ("of_a_table",)
class PreTrainedConfig(SomeConfigMixin):
    a_field: int = 1
    def __post_init__(self, an_argument=None, **kwargs):
        self.taken = kwargs.pop("popped", None)
        for name in ("looped",):
            setattr(self, name, 1)
class WatermarkingConfig:
    bias: float = 2.0
"""
MODELING = '''
"""Of documented: `config.documented` is "only_in_text"."""
# config.commented
def forward(self, config, model, local):
    config.plain + self.config.get_text_config().chained
    getattr(config, "with_default", None) or hasattr(model.config, "tested")
    config_dict["subscripted"], "inside" in config, helper(config, "helped")
    part = copy.deepcopy(model.config)
    part.of_an_alias
    config.update(keyword=1)
    nn.Linear(config.size, not_read=local.neither)
def by_table(config):
    return [getattr(config, name) for name in _NAMES]
def other():
    return "in_another_function"
_NAMES = ("of_a_table",)
'''
READS = """
    a_field an_argument popped looped taken plain chained with_default tested subscripted inside helped of_an_alias
    keyword size of_a_table of_the_parent shown alias real_name __class__"""
READS_NOT = """
    documented only_in_text commented local not_read neither in_another_function bias of_a_trainer of_a_tokenizer
    of_gguf of_llama unheard_of"""


def test_the_ways_to_read_a_key_are_found_in_the_source_and_other_mentions_are_not(tmp_path):
    files = {
        "__init__.py": "raise ImportError('the control plane must not import it')",
        "configuration_utils.py": SHARED,
        "trainer.py": "self.model.config.of_a_trainer",
        "tokenization_utils_base.py": "config.of_a_tokenizer",
        "integrations/gguf/mapping.py": "config.of_gguf",
        "models/qwen9/configuration_qwen9.py": """
            from ..elder.configuration_elder import ElderConfig
            class Qwen9Config(ElderConfig):
                model_type = "qwen9"
                attribute_map = {"alias": "real_name"}
                shown: int = interval(min=0)(default=1)
            """,
        "models/qwen9/modeling_qwen9.py": MODELING,
        "models/elder/configuration_elder.py": "class ElderConfig:\n    of_the_parent: int = 1",
        "models/llama/modeling_llama.py": "config.of_llama",
    }
    for name, source in files.items():
        path = tmp_path / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    code = """if True:
        import sys, json
        from chitu.models.generic.key_reads import keys_read
        print(json.dumps([sorted(keys_read(sys.argv[1:], "qwen9")), keys_read(["x"], "qwen10")]))"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    asked = [*READS.split(), *READS_NOT.split()]
    said = subprocess.run(
        [sys.executable, "-c", code, *asked], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout) == [sorted(READS.split()), None]


def test_an_unknown_key_is_refused_if_an_older_library_lacks_the_class():
    assert keys_read(["flash_attn"], "no_such_type") is None, "what it would read cannot be told"
