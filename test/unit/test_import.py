"""`chitu import`: recipes of other projects become topologies that the checks accept; nothing is dropped."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from chitu.cli.commands import run
from chitu.config.load import parse_topology
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError
from chitu.launch.plan import plan, plan_text
from chitu.models.config import ModelSpec
from chitu.models.generic.library import library_version
from chitu.tools.recipes.importing import Imported, imported_from, text_of
from chitu.tools.recipes.models import MODELS, known_name
from chitu.tools.recipes.options import BY_HAND, FACTS, KEPT_WITH, KEYS, LEFT_OUT, REFUSED, read_options
from chitu.tools.recipes.recipe import Side
from chitu.tools.recipes.srt_slurm import variants

ROOT = Path(__file__).resolve().parents[2]


def srt(**changes: Any) -> dict[str, Any]:
    """Return a recipe in the form of srt-slurm; `changes` by dotted path, with `__` for dots and `_` for dashes."""
    both = {"served-model-name": "deepseek-ai/DeepSeek-R1", "tp-size": 8, "kv-cache-dtype": "fp8_e4m3", "page-size": 64}
    recipe: dict[str, Any] = {
        "name": "r1",
        "model": {"path": "dsr1", "container": "image", "precision": "fp8"},
        "resources": {
            **{"gpu_type": "h200", "gpus_per_node": 8, "prefill_nodes": 1, "prefill_workers": 1},
            **{"decode_nodes": 2, "decode_workers": 2},
        },
        "backend": {
            "type": "sglang",
            "prefill_environment": {"A": "1"},
            "sglang_config": {
                "prefill": {**both, "ep-size": 8, "mem-fraction-static": 0.85, "chunked-prefill-size": 16384},
                "decode": {
                    **{**both, "dp-size": 8, "enable-dp-attention": True, "ep-size": 8},
                    **{"max-running-requests": 1024, "mem-fraction-static": 0.75, "context-length": 9000},
                    **{"speculative-algorithm": "EAGLE", "speculative-num-steps": 2, "attention-backend": "fa"},
                },
            },
        },
        "benchmark": {"type": "sa-bench"},
    }
    for path, value in changes.items():
        *sections, last = path.split("__")
        below = recipe
        for name in sections:
            below = below[name]
        below[last.replace("_", "-") if sections[-1:] in (["prefill"], ["decode"]) else last] = value
    return recipe


def imported(recipe: Any, card: str = "", variant: str = "", hosts: tuple[str, ...] = ()) -> Imported:
    text = recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False)
    return imported_from(text, variant, card, hosts)


def planned(found: Imported) -> str:
    """Return what `chitu plan` prints of an imported topology, which its checks accept."""
    assert not found.obstacles
    data = yaml.safe_load(re.sub(r"node(\d)\.example", r"10.0.0.1\1", text_of(found, "x.yaml")))
    topology = parse_topology(data)
    assert list(problems(topology, need_model=False)) == []
    return plan_text(topology, plan(topology, "FILE", (), 64), 64, ())


def test_a_recipe_of_srt_slurm_is_a_topology() -> None:
    found = imported(srt())
    assert "P0 on 10.0.0.10: tp_size 8, experts spread over 8" in planned(found)
    router = found.topology["dp_config"]["router"]
    assert [entry["host"] for entry in router["decode_schedulers"]] == ["node1.example", "node2.example"]
    assert router["prefill_schedulers"][0]["memory_fraction"] == 0.85
    assert router["decode_schedulers"][0]["memory_fraction"] == 0.75
    assert router["decode_schedulers"][0]["dp_size"] == 8 and "dp_size" not in router["prefill_schedulers"][0]
    assert found.topology["cache"] == {"kv_dtype": "fp8_e4m3", "page_size": 64}
    assert found.topology["model"] == {"max_model_len": 9000}
    assert found.topology["scheduler"] == {
        **{"chunk_size": 16384, "max_batched_tokens": 16384, "max_running_requests": 128},
        **{"speculation": "mtp", "mtp_tokens": 2},
    }, "SGLang's max-running-requests is of all 8 data ranks"
    notes = "\n".join(found.notes)
    assert "attention_backend" in notes and "backend.prefill_environment" in notes and "benchmark" in notes
    assert "unknown" not in notes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__path": "dsv4-pro", "backend__sglang_config__prefill__served_model_name": None}, None),
        ({"backend__sglang_config__prefill__pipeline_parallel_size": 2}, "prefill: pipeline stages (pp 2)"),
        ({"backend__sglang_config__prefill__tp_size": 16}, "prefill: tensor parallelism over several hosts (tp 16"),
        ({"backend__sglang_config__decode__speculative_algorithm": "EAGLE3"}, "drafts by eagle3: only a layer"),
        (
            {"backend__sglang_config__decode__speculative_draft_model_path": "heads"},
            "drafts by eagle heads beside it: only a layer",
        ),
        ({"backend__sglang_config__decode__disaggregation_transfer_backend": "mori"}, "no transport here is called"),
        ({"backend__sglang_config__prefill__tp_size": 4}, "weights: 177 GB a card (fp8; experts alone"),
        ({"backend__sglang_config__prefill__enable_prefill_cp": True}, "enable_prefill_cp: context parallelism"),
    ],
)
def test_what_keeps_a_recipe_from_running_is_named(changes: dict[str, Any], says: str | None) -> None:
    recipe = srt(**changes)
    if says is None:
        recipe["backend"]["sglang_config"]["decode"].pop("served-model-name")
        says = "DeepSeek-V4-Pro: sparse attention"
    assert any(says in obstacle for obstacle in imported(recipe).obstacles), imported(recipe).obstacles


def test_unknown_keys_are_named_wherever_they_are() -> None:
    recipe = srt(
        backend__sglang_config__decode__new_option=3,
        backend__sglang_config__prefill__json_model_override_args='{"a": 1}',
        resources__gpus_per_prefill=4,
        resources__racks=2,
    )
    recipe |= {"weather": "fine"}
    found = imported(recipe)
    notes = "\n".join(found.notes)
    for named in ("unknown: weather", "unknown: resources.racks", "unknown, decode: new_option (3)"):
        assert named in notes
    assert "gpus_per_prefill (4, while the plan of the engine has 8 cards)" in notes
    assert (
        'by hand, prefill: json_model_override_args: make this change in the folder\'s config.json: {"a": 1}' in notes
    )
    assert f"# {found.notes[0]}\n" in text_of(found, "x.yaml")


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,9}(-[a-z]{1,9}){0,2}", fullmatch=True), st.integers(1, 9), max_size=8),
    st.sampled_from(["sglang", "vllm", "trtllm"]),
)
def test_no_option_is_dropped_without_a_word(options: dict[str, Any], engine: str) -> None:
    words = read_options(engine, options, 1)
    named = words.unknown.keys() | words.left_out.keys() | words.refused.keys() | words.by_hand.keys()
    for option in options:
        name = option.replace("-", "_")
        assert (name in named) is not (name in FACTS or name in KEYS or name in KEPT_WITH)


def test_an_option_has_one_meaning() -> None:
    names = [*KEYS, *FACTS, *REFUSED, *BY_HAND, *KEPT_WITH]
    assert len(names) == len(set(names))
    assert not [name for name in (*KEYS, *REFUSED, *BY_HAND) for each in LEFT_OUT.values() if re.fullmatch(each, name)]


def test_variants_are_merged_and_zipped() -> None:
    text = {
        "base": srt(),
        "override_tp": {"resources": {"prefill_workers": 3}, "benchmark": None},
        "zip_override_many": {
            "name": ["a", "b"],
            "resources": {"prefill_workers": [1, 2], "decode_workers": [4]},
            "backend": {"sglang_config": {"prefill": {"ep-size": None}}},
        },
    }
    found = variants(text)
    assert list(found) == ["base", "override_tp", "zip_override_many[0]", "zip_override_many[1]"]
    assert "benchmark" not in found["override_tp"] and found["override_tp"]["resources"]["decode_workers"] == 2
    recipe = imported(text, variant="zip_override_many[1]").recipe
    assert (recipe.prefill, recipe.decode.instances) == (Side(2, 8, 1, 1, "cut"), 4)
    with pytest.raises(ConfigError, match=r"choose one by --variant: base, override_tp, zip_override_many\[0\]"):
        imported(text)


@pytest.mark.parametrize(
    ("engine", "options", "side"),
    [
        ("sglang", {"tp-size": 8, "dp-size": 4, "enable-dp-attention": True}, Side(1, 2, 4, 1, "cut")),
        ("sglang", {"tp-size": 4, "dp-size": 2}, Side(2, 4, 1, 1, "cut")),
        ("sglang", {"tp": 8, "moe-a2a-backend": "deepep"}, Side(1, 8, 1, 1, "spread")),
        ("sglang", {"tp": 8, "moe-a2a-backend": "none"}, Side(1, 8, 1, 1, "cut")),
        ("trtllm", {"tensor_parallel_size": 8, "enable_attention_dp": True}, Side(1, 1, 8, 1, "cut")),
        ("trtllm", {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4}, Side(1, 4, 1, 1, "spread")),
        (
            "vllm",
            {"tensor-parallel-size": 2, "data-parallel-size": 8, "enable-expert-parallel": True},
            Side(1, 2, 8, 1, "spread"),
        ),
    ],
)
def test_the_plan_is_read_as_each_engine_means_it(engine: str, options: dict[str, Any], side: Side) -> None:
    assert read_options(engine, options, 1).side == side


# ----------------------------------------------------------------------------------------------------------- manifests

DYNAMO = """
apiVersion: v1
kind: ConfigMap
metadata: {name: engine-files}
data:
  p.yaml: |
    tensor_parallel_size: 1
    kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8, tokens_per_block: 32}
    max_batch_size: 64
---
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: oss}
spec:
  services:
    Frontend: {componentType: frontend, replicas: 1, extraPodSpec: {mainContainer: {image: x}}}
    FirstWorker:
      subComponentType: prefill
      replicas: 4
      resources: {limits: {gpu: "1"}}
      extraPodSpec:
        mainContainer:
          command: [/bin/sh, -c]
          env:
          - {name: MODEL, value: openai/gpt-oss-120b}
          - {name: FILE, value: /config/p.yaml}
          args:
          - |
            # starts P, that's all
            python3 -m dynamo.trtllm --model-path "${MODEL}" \\
              --extra-engine-args $FILE --disaggregation-mode prefill --odd-option 7
    dec:
      componentType: worker
      resources: {limits: {gpu: "4"}}
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.trtllm]
          args: [--model-path, openai/gpt-oss-120b, --tensor-parallel-size, "4", --disaggregation-mode, decode]
"""
WIDE = """
apiVersion: disaggregatedset.x-k8s.io/v1
kind: DisaggregatedSet
metadata: {name: wide}
spec:
  slices: 2
  roles:
  - name: prefill
    spec: &spec
      replicas: 1
      leaderWorkerTemplate:
        size: 2
        workerTemplate:
          spec:
            nodeSelector: {nvidia.com/gpu.product: NVIDIA-H200}
            containers:
            - name: engine
              command: [bash, -c]
              env: [{name: LOCAL, value: "8"}, {name: TP, value: "1"}]
              args:
              - |-
                START=$(( ${LWS_WORKER_INDEX:-0} * LOCAL ))
                exec vllm serve $MORE_ARGS \\
                  deepseek-ai/DeepSeek-R1-0528 \\
                  --tensor-parallel-size $TP --data-parallel-size $((LWS_GROUP_SIZE * LOCAL)) \\
                  --data-parallel-start-rank $START --enable-expert-parallel \\
                  --kv_transfer_config '{"kv_connector": "NixlConnector",
                                         "kv_role": "kv_both"}' \\
                  --max-num-seqs ${NOT_GIVEN}
              resources: {limits: {nvidia.com/gpu: "8"}}
  - {name: decode, spec: *spec}
"""
PLAIN = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: %s, labels: {llm-d.ai/role: %s}}
spec:
  replicas: %d
  template:
    spec:
      containers:
      - command: [vllm, serve]
        args: [Qwen/Qwen3-VL-32B-Instruct, --tensor-parallel-size=%d, --block-size=128]
        resources: {limits: {nvidia.com/gpu: "%d"}}
"""


def test_a_manifest_of_dynamo_is_read_with_its_variables_and_files() -> None:
    found = imported(DYNAMO, card="b200")
    assert found.recipe[:4] == ("gpt-oss-120b", "fp4", "b200", 8)
    assert (found.recipe.prefill, found.recipe.decode) == (Side(4, 1, 1, 1, "cut"), Side(1, 4, 1, 1, "cut"))
    assert found.topology["cache"] == {"kv_dtype": "fp8_e4m3", "page_size": 32}
    assert found.topology["dp_config"]["router"]["prefill_schedulers"][3]["memory_fraction"] == 0.8
    assert "unknown, prefill: odd_option (7)" in found.notes
    assert "P3 on 127.0.0.1: tp_size 1" in planned(found) and "D0 on 127.0.0.1: tp_size 4" in planned(found)


def test_a_manifest_of_llm_d_is_read_with_its_products_and_slices() -> None:
    found = imported(WIDE)
    assert found.recipe[:4] == ("DeepSeek-R1", "fp8", "h200", 8)
    assert found.recipe.prefill == found.recipe.decode == Side(2, 1, 16, 1, "spread")
    assert "unknown, decode: max_num_seqs (${NOT_GIVEN})" in found.notes
    entry = found.topology["dp_config"]["router"]["decode_schedulers"][1]
    assert entry["hosts"] == ["node6.example", "node7.example"] and entry["dp_size"] == 16
    planned(found)


def test_encoders_become_entries_of_their_own() -> None:
    roles = [("e", "encode", 2, 1, 1), ("p", "prefill", 1, 4, 4), ("d", "decode", 1, 2, 2)]
    found = imported("---".join(PLAIN % each for each in roles), card="h200")
    assert len(found.topology["dp_config"]["router"]["encode_schedulers"]) == 2
    assert found.recipe.prefill.tp == 4 and found.topology["cache"]["page_size"] == 128
    planned(found)
    wide = imported("---".join(PLAIN % each for each in [("e", "encode", 1, 2, 2), *roles[1:]]), card="h200")
    assert wide.obstacles[0] == "encode: 1 x (tp 2); here each is one process on one card"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is no YAML"),
        ("[1, 2]", "no recipe that is known"),
        ("kind: Deployment\nspec: {}", "no container of the manifest runs"),
        (PLAIN % ("p", "prefill", 1, 1, 1) + "---" + PLAIN % ("q", "prefill", 1, 1, 1), "two kinds of workers for"),
        (WIDE.replace("replicas: 1", "replicas: ${COUNT}"), "replicas is '${COUNT}', which is no number"),
        (WIDE.replace('"8"}, {name: TP', '"x"}, {name: TP'), "data_parallel_size is"),
        (WIDE.replace("'{\"kv", '{"kv'), "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_clear_error(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        imported(text)


@given(st.data())
def test_a_damaged_recipe_is_a_clear_error(data: st.DataObject) -> None:
    documents = [srt(), *yaml.safe_load_all(DYNAMO), yaml.safe_load(WIDE)]
    damaged = copy.deepcopy(data.draw(st.sampled_from([documents[:1], documents[1:3], documents[3:]])))
    below: Any = damaged
    while True:
        places = list(below) if isinstance(below, dict) else list(range(len(below)))
        place = data.draw(st.sampled_from(places))
        if not isinstance(below[place], dict | list) or not below[place] or data.draw(st.booleans()):
            break
        below = below[place]
    below[place] = data.draw(st.sampled_from([None, 3, -1, "x", "$X", [], {}, [None], {"a": None}, True, 0.5]))
    try:
        imported(yaml.safe_dump_all(damaged))
    except ConfigError as error:
        assert error.message


# -------------------------------------------------------------------------------------------------- command and tables


def test_the_command_writes_a_file_that_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, target = tmp_path / "r.yaml", tmp_path / "t.yaml"
    recipe.write_text(yaml.safe_dump(srt()), encoding="utf-8")
    assert run(["import", str(recipe), "--hosts", "10.0.0.1,10.0.0.2,10.0.0.3", "--output", str(target)]) == 0
    assert "DeepSeek-R1, 1 x (tp 8, experts spread) and 2 x (dp 8, experts spread)" in capsys.readouterr().out
    model = ROOT / "chitu" / "assets" / "chitu-tiny"
    assert run(["plan", str(target), "--model", str(model)]) in (0, 2)
    printed = capsys.readouterr()
    assert "model.max_model_len" in printed.err or "10.0.0.3" in printed.out
    assert run(["import", str(recipe), "--hosts", "10.0.0.1"]) == 2
    assert "more than the 1 hosts that --hosts names" in capsys.readouterr().err
    recipe.write_text(yaml.safe_dump(srt(backend__sglang_config__prefill__tp_size=16)), encoding="utf-8")
    target.unlink()
    assert run(["import", str(recipe), "--output", str(target)]) == 1
    assert "cannot run here: prefill: tensor parallelism over several hosts" in capsys.readouterr().out
    assert not target.exists()
    assert run(["import", str(tmp_path / "none.yaml")]) == 1


@pytest.mark.skipif(library_version() < "5", reason="transformers 4 has fewer models")
def test_the_table_of_models_says_what_the_code_does() -> None:
    tool = runpy.run_path(str(ROOT / "script" / "recipes.py"))
    for name, model in MODELS.items():
        spec = tool["spec_of"](model.like)
        assert isinstance(spec, str) == bool(model.refused), (name, spec)
        if isinstance(spec, ModelSpec):
            assert (spec.code == "own", tool["has_drafts"](spec)) == (model.is_own, model.drafts), name
        elif model.like:
            assert model.refused in spec


def test_models_are_known_by_the_names_of_their_checkpoints() -> None:
    names = {
        **{"deepseek-ai/DeepSeek-R1-0528": "DeepSeek-R1", "dsr1-fp8": "DeepSeek-R1", "dsfp4": "DeepSeek-R1"},
        **{"nvidia/DeepSeek-V3.2-NVFP4": "DeepSeek-V3.2", "deepseekv4-fp4": "DeepSeek-V4-Pro"},
        **{"deepseek-ai/DeepSeek-V4.1-Flash": "DeepSeek-V4-Flash", "zai-org/GLM-5-FP8": "GLM-5"},
        **{"zai-org/GLM-5.2": "GLM-5.2", "Qwen/Qwen3-32B-FP8": "Qwen3-32B", "qwen3.5-fp8": "Qwen3.5-397B-A17B"},
        **{"RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "Llama-3.3-70B", "openai/gpt-oss-120b": "gpt-oss-120b"},
        **{"nvidia/Kimi-K2.5-NVFP4": "Kimi-K2.5", "moonshotai/Kimi-K2-Instruct": "Kimi-K2"},
        **{"deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "DeepSeek-R1-Distill-Llama-8B", "a/b": "b"},
    }
    assert {name: known_name(name) for name in names} == names
