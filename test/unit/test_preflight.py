"""What a launcher checks before it starts a process: one sentence with its cure, without torch or a child process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import bound_ports, instances
from chitu.engine.memory_budget import GIB, MIN_CONTEXT_TOKENS, pool_problems, small_pool
from chitu.kv_transfer.transports.nixl import MODULES
from chitu.launch.preflight import (
    MOONCAKE_WITH_CUDA,
    MOONCAKE_WITHOUT_CUDA,
    Bind,
    Level,
    gpu_transfer_findings,
    look_at_model,
    look_at_ports,
    memory_findings,
    port_findings,
    transport_findings,
)
from chitu.models.checkpoint import WeightCount, count_weights
from chitu.models.config import read_model_spec, weight_files

SPEC = read_model_spec(TINY_MODEL_DIR)
TINY = f"model.path={TINY_MODEL_DIR}"
ON_CPUS = [f"dp_config.router.{role}_schedulers.0.devices=[cpu]" for role in ("prefill", "decode")]


def local(*overrides: str) -> Topology:
    return load_topology(None, [TINY, *ON_CPUS, *overrides])


def test_a_taken_port_is_named_with_its_key_and_a_cure() -> None:
    binds = [
        Bind("dp_config.router.port", "127.0.0.1", 21003, "Address already in use"),
        Bind("dp_config.router.stats_port", "127.0.0.1", 80, "Permission denied"),
        Bind("dp_config.router.token_port", "127.0.0.1", 29700),
    ]
    found = list(port_findings(binds))
    assert [finding.level for finding in found] == [Level.ERROR, Level.ERROR, Level.OK]
    assert found[0].sentence == (
        "dp_config.router.port: cannot listen on 127.0.0.1:21003: Address already in use; "
        "give another one with --port, 0 for any free one"
    )
    assert "set dp_config.router.stats_port to another port" in found[1].cure


@pytest.mark.parametrize("key", ["dp_config.router.port", "dp_config.router.stats_port"])
def test_for_an_address_of_another_machine_no_other_port_is_the_cure(key: str) -> None:
    (finding,) = port_findings([Bind(key, "10.0.0.1", 21003, "Cannot assign requested address")])
    assert finding.cure == "give an address of this machine in place of 10.0.0.1"


def test_every_port_that_is_listened_on_is_looked_at() -> None:
    topology = local("dp_config.router.hosts=[127.0.0.1, localhost, 127.0.0.1]", "dp_config.router.token_port=7000")
    ports = [port for _, _, port in bound_ports(topology)]
    http = topology.dp_config.router.port
    assert {7000, 7002, 7004, http, http + 1, http + 2, http + 3} <= {*ports} and ports.count(http) == 1
    assert sum(key.endswith("_schedulers.0.port") for key, _, _ in bound_ports(topology)) == 2


def test_each_of_several_routers_looks_at_its_own_address() -> None:
    """The first one's is not the second machine's."""
    topology = local("dp_config.router.hosts=[192.0.2.1, 127.0.0.2]", "dp_config.router.port=0")
    assert {(bind.host, bind.error) for bind in look_at_ports(topology, "127.0.0.2")} == {("127.0.0.2", "")}
    (api,) = (bind for bind in look_at_ports(topology, "192.0.2.1") if bind.key == "dp_config.router.port")
    assert (api.host, bool(api.error)) == ("192.0.2.1", True)


def test_a_sound_model_has_a_hash_and_a_length() -> None:
    spec, found = look_at_model(local())
    assert spec == SPEC and not found.error and len(found.hash) == 32
    assert found.max_model_len == SPEC.max_model_len


@pytest.mark.parametrize(
    ("missing", "written", "part"),
    [
        ("tokenizer.json", {}, "has no tokenizer.json"),
        ("*.safetensors", {}, "holds no safetensors file"),
        (
            "*.safetensors",
            {"model.safetensors": "version https://git-lfs.github.com"},
            "is no safetensors file",
        ),
        ("config.json", {"config.json": '{"architectures": ["MixtralForCausalLM"]}'}, "is not supported"),
        ("config.json", {"config.json": "{"}, "cannot be read"),
        ("config.json", {}, "config.json does not exist"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_sentence(
    tmp_path: Path, missing: str, written: dict[str, str], part: str
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(TINY_MODEL_DIR, folder)
    for path in folder.glob(missing):
        path.unlink()
    for name, text in written.items():
        (folder / name).write_text(text)
    spec, found = look_at_model(load_topology(None, [f"model.path={folder}"]))
    assert spec is None
    assert part in found.error and str(folder) in found.error and "\n" not in found.error


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_a_transport_without_its_library_names_the_extra(transport: str) -> None:
    topology = local(f"dp_config.router.pd_disaggregation.transport={transport}")
    assert not list(transport_findings(topology, lambda module: True))
    (finding,) = transport_findings(topology, lambda module: False, (3, 13, 9))
    assert finding.level is Level.ERROR and f"install the extra {transport}" in finding.cure
    (finding,) = transport_findings(topology, lambda module: False, (3, 14, 0))
    assert ("Python 3.11 to 3.13" in finding.cure) == (transport == "mooncake"), finding
    assert not list(transport_findings(local(), lambda module: False))
    unified = load_topology("unified_local", [f"dp_config.router.pd_disaggregation.transport={transport}"])
    assert not list(transport_findings(unified, lambda module: False)), "nothing is transferred"


def test_auto_between_hosts_needs_mooncake() -> None:
    hosts = [f"dp_config.router.{role}_schedulers.0.host=10.0.0.{k}" for k, role in ((1, "prefill"), (2, "decode"))]
    (finding,) = transport_findings(local(*hosts), lambda module: False)
    assert finding.level is Level.ERROR and "P and D are on several hosts" in finding.says
    assert not list(transport_findings(local(*hosts), lambda module: module == "mooncake"))


@pytest.mark.parametrize(
    ("installed", "is_refused"),
    [
        ([MOONCAKE_WITHOUT_CUDA], True),
        ([MOONCAKE_WITHOUT_CUDA, MOONCAKE_WITH_CUDA[0]], False),
        ([MOONCAKE_WITH_CUDA[1]], False),
        ([], False),
    ],
)
def test_a_mooncake_without_cuda_is_refused_where_gpus_send_by_themselves(
    installed: list[str], is_refused: bool
) -> None:
    gpus = [f"dp_config.router.{role}_schedulers.0.devices=[cuda:0]" for role in ("prefill", "decode")]
    topology = local(*gpus, "dp_config.router.pd_disaggregation.transport=mooncake")
    found = list(gpu_transfer_findings(topology, "rdma", installed))
    assert [finding.level for finding in found] == [Level.ERROR] * is_refused
    assert all("mooncake-cuda13" in finding.cure for finding in found)


def test_a_library_is_looked_for_under_every_name_that_it_is_imported_by() -> None:
    topology = local("dp_config.router.pd_disaggregation.transport=nixl")
    for name in MODULES:
        assert not list(transport_findings(topology, lambda module, name=name: name == f"{module}._api"))


def problems(available_bytes: int, *overrides: str) -> list[str]:
    topology = local(*overrides)
    return list(pool_problems(topology, SPEC, instances(topology), available_bytes))


def test_a_pool_that_memory_cannot_hold_is_refused_with_the_number_that_fits() -> None:
    (problem,) = problems(8 * GIB, "cache.num_pages=1000000000", "model.dtype=float32")
    assert problem.startswith("cache.num_pages: the KV pages of P0, D0 would have ")
    fits = int(problem.split("at most ")[1].split(" pages")[0])
    assert not problems(8 * GIB, f"cache.num_pages={fits}", "model.dtype=float32")
    assert problems(8 * GIB, f"cache.num_pages={fits + 1}", "model.dtype=float32")
    # One instance may have what the other leaves.
    own = f"dp_config.router.decode_schedulers.0.num_pages={2 * fits + 1}"
    (problem,) = problems(8 * GIB, own, "model.dtype=float32")
    assert problem.startswith("dp_config.router.decode_schedulers.0.num_pages: ") and " each" not in problem
    assert not problems(0), "sized by itself"


def test_pages_on_cpus_are_counted_in_the_dtype_that_they_get() -> None:
    assert SPEC.dtype == "bfloat16", "a checkpoint of 16 bits, which CPUs widen"
    (problem,) = problems(8 * GIB, "cache.num_pages=1000000000")
    fits = int(problem.split("at most ")[1].split(" pages")[0])
    for dtype, times in (("auto", 1), ("float32", 1), ("bfloat16", 2)):
        assert not problems(8 * GIB, f"cache.num_pages={times * fits}", f"model.dtype={dtype}")
        assert problems(8 * GIB, f"cache.num_pages={times * fits + 2}", f"model.dtype={dtype}")


def test_weights_that_memory_cannot_hold_are_refused_with_the_numbers(tmp_path: Path) -> None:
    num_weights = count_weights(TINY_MODEL_DIR)
    stored = sum(file.stat().st_size for file in weight_files(TINY_MODEL_DIR))
    assert 0.9 * stored < 2 * num_weights < stored, "bfloat16, and the headers"
    many = WeightCount(10 * GIB)  # numbers: 40 GiB in float32

    def words(available: int, *overrides: str, cards: dict[int, int] | None = None) -> list[str]:
        topology = local(*overrides)
        found = memory_findings(topology, SPEC, instances(topology), available, many, cards or {})
        return [finding.sentence for finding in found if finding.level is Level.ERROR]

    (sentence,) = words(71 * GIB)
    assert "40.0 GiB (float32) in each of P0, D0 on CPUs, 80.0 GiB together, but 71.0 GiB" in sentence
    assert sentence.endswith(", or model.dtype=bfloat16 (40.0 GiB together)")
    assert words(72 * GIB) == [], "a tenth may stay unread"
    assert "bfloat16" in words(36 * GIB)[0] and "bfloat16" not in words(35 * GIB)[0], "named where it is a cure"
    assert words(36 * GIB, "model.dtype=bfloat16") == [] and len(words(35 * GIB, "model.dtype=bfloat16")) == 1
    topology = local()
    kept = memory_findings(topology, SPEC, instances(topology), 31 * GIB, many._replace(cpu_bytes=16 * GIB))
    assert not [*kept], "16 GiB each: most are kept small"
    key = "dp_config.router.{}_schedulers.0.{}"
    gpus = [key.format(role, "devices=[cuda:0,cuda:1]") for role in ("prefill", "decode")]
    gpus += [key.format(role, "tp_size=2") for role in ("prefill", "decode")]
    (first, second) = words(0, *gpus, cards={0: 19 * GIB, 1: 19 * GIB, 2: GIB})
    assert "P0, D0 on cuda:0 would have 20.0 GiB (bfloat16), but it has 19.0 GiB" in first and "cuda:1" in second
    assert words(0, *gpus, cards={0: 20 * GIB, 1: 20 * GIB}) == words(0, *gpus) == []
    many = WeightCount(10 * GIB, 0, 8 * GIB, 9 * GIB)  # 8 of 10 in 8 bits, with scales
    assert words(0, *gpus, cards={0: 14 * GIB, 1: 14 * GIB}) == []
    assert "13.0 GiB (bfloat16, or as small as stored)" in words(0, *gpus, cards={0: 12 * GIB})[0]


def test_a_pool_of_a_few_tokens_is_warned_of() -> None:
    topology = local("cache.num_pages=2")
    (finding,) = memory_findings(topology, SPEC, instances(topology), 8 * GIB)
    assert finding.level is Level.WARNING
    assert "2 pages holds 32 tokens" in finding.says and f"limit is {SPEC.max_model_len}" in finding.says
    assert small_pool(MIN_CONTEXT_TOKENS // 16 - 1, 16, 4096)
    assert not small_pool(MIN_CONTEXT_TOKENS // 16, 16, 4096)
    assert not small_pool(4, 16, 64), "all that the model takes"
