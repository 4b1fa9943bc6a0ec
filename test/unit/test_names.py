"""The names and paths that the interface document fixes: a test fails if one of them disappears."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from chitu import log
from chitu.config.key_paths import known_keys

ROOT = Path(__file__).parents[2]

PATHS = [
    "setup.py",
    "chitu/serve/api_server.py",
    "chitu/serve/scheduler.py",
    "chitu/pd_request_router.py",
    "chitu/pd_coordination.py",
    "chitu/pd_service.py",
    "chitu/pd_scheduler.py",
    "chitu/cache_manager.py",
    "chitu/kv_transfer/kv_manager.py",
    "chitu/kv_transfer/bootstrap.py",
    "chitu/kv_transfer/layout.py",
    "chitu/kv_transfer/transports/mooncake.py",
    "chitu/config/pd_disagg_1p1d_multi_node.yaml",
    "chitu/config/pd_disagg_2p2d_multi_node.yaml",
    "chitu/config/pd_disagg_2p3d_multi_node.yaml",
    "script/srun_pd_disagg_1p1d_two_nodes.sh",
    "script/srun_pd_disagg_2p2d_two_nodes.sh",
    "script/srun_pd_disagg_2p3d_two_nodes.sh",
    "script/start_pd_separation.sh",
    "test/verify_xpyd_topology.py",
]

NAMES = [
    ("chitu.pd_request_router", "PDRequestRouter.add_request"),
    ("chitu.pd_coordination", "PDCoordination"),
    ("chitu.pd_service", "PDSchedulerService"),
    ("chitu.pd_scheduler", "PDScheduler"),
    ("chitu.cache_manager", "PagedKVCacheManager.get_page_indices"),
    ("chitu.cache_manager", "PagedKVCacheManager.insert_kv_cache_from_transfer"),
    ("chitu.cache_manager", "PagedKVCacheManager.remove_task"),
    ("chitu.kv_transfer.kv_manager", "KVManager"),
    ("chitu.kv_transfer.layout", "MetadataBuffers.allocate"),
    ("chitu.kv_transfer.layout", "MetadataBuffers.free"),
    ("chitu.protocol.peer", "KVPoll"),
    ("chitu.types", "_to_uuid"),
    ("chitu.protocol", "KVArgsRegisterInfo"),
    ("chitu.protocol", "TransferInfo"),
]

KEYS = [
    "dp_config.scheduler_base_port",
    "dp_config.router.host",
    "dp_config.router.port",
    "dp_config.router.stats_port",
    "dp_config.router.token_port",
    "dp_config.router.pd_disaggregation.coordination_port",
    "dp_config.router.pd_disaggregation.metadata_sync_port",
    "dp_config.router.pd_disaggregation.bootstrap_port",
    "dp_config.router.pd_disaggregation.ib_device",
    "dp_config.router.prefill_schedulers.0.port",
    "dp_config.router.decode_schedulers.0.port",
]

ANCHORS = [
    ("CREATED_PD_REQUEST", "created pd request: %s -> P%d-D%d"),
    ("PROCESSING_PREFILL", "processing prefill request: %s"),
    ("FINISHED_KV", "finished kv cache transfer for %s"),
    ("FINISHED_AUX", "finished aux transfer for %s"),
    ("PROCESSING_DECODE", "processing decode request: %s"),
    ("DECODE_REGISTERED", "decode endpoint registered to prefill (engine_rank=%d)"),
    ("RECEIVED_KV", "received kv cache for %s"),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_fixed_path_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_a_fixed_name_is_there(module: str, name: str) -> None:
    value: object = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)


@pytest.mark.parametrize("key", KEYS)
def test_a_fixed_key_is_there(key: str) -> None:
    assert key in set(known_keys())


def test_no_text_installs_the_package_index_s_other_project_called_chitu() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("script/*.sh"), *ROOT.glob("chitu/**/*.py")]
    told = re.compile(r"\bchitu(-pd)?\[[a-z]|install +(-\S+ +)*['\"]?chitu\b")
    found = [f"{path}: {hit[0]}" for path in texts for hit in told.finditer(path.read_text(encoding="utf-8"))]
    assert found == []


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "chitu").rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize(("constant", "text"), ANCHORS, ids=[constant for constant, _ in ANCHORS])
def test_a_log_anchor_keeps_its_words_and_is_used(constant: str, text: str) -> None:
    assert getattr(log, constant) == text
    users = [path for path in (ROOT / "chitu").rglob("*.py") if path.name != "log.py" and constant in path.read_text()]
    assert users, f"nobody logs {constant}"
