"""Any value at any key of a topology, or any content of its file, gives a topology or a one-sentence error."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chitu.config.devices import why_no_device
from chitu.config.key_paths import known_keys
from chitu.config.load import load_topology, parse_topology
from chitu.config.schema import Topology
from chitu.config.topology import instances
from chitu.config.topology_checks import check, problems
from chitu.errors import ConfigError
from chitu.launch.plan import launch_problems
from chitu.process.node_devices import Device, NodeDevices
from chitu.process.placement import assign_devices, with_shares

PLAIN = msgspec.json.decode(msgspec.json.encode(load_topology("pd_disagg_1p1d_multi_node")))
VALUES: list[Any] = [None, "", "x", 0, -1, 1, 1 << 62, 10**22, 1e300, float("nan"), float("inf"), True]
VALUES += [
    [],
    [""],
    [None],
    [[]],
    {},
    {"a": 1},
    datetime.date(2020, 1, 1),
    b"x",
    ["cpu"],
    ["cuda:7"],
    ["cpu", "cuda:0"],
]
NODES = [NodeDevices((), "nothing is there"), NodeDevices((Device("0", "GPU-0", "GPU"),), "one is there")]


def put(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(PLAIN)
    *parents, last = path.split(".")
    node: Any = data
    for part in parents:
        if isinstance(node, list) and not node:
            node.append({})
        node = node[int(part)] if isinstance(node, list) else node[part]
    if isinstance(node, list):
        node[int(last) :] = [value]
    else:
        node[last] = value
    return data


def judge(topology: Topology) -> None:
    """Check the topology as a launcher does before it starts anything."""
    list(problems(topology, None, need_model=False))
    list(launch_problems(topology))
    for node in NODES:
        shared = with_shares(topology, assign_devices(topology, instances(topology), node))
        check(shared, need_model=False)


@pytest.mark.parametrize("key", list(known_keys()))
def test_any_value_of_a_key_is_taken_or_refused_by_a_sentence(key: str) -> None:
    for value in VALUES:
        try:
            judge(parse_topology(put(key, value)))
        except ConfigError as error:
            assert error.message and "\n" not in error.message, (key, value)


ODD_YAML = [
    "? [1]\n: 2",
    "? {a: 1}\n: 2",
    "&a [*a]",
    "*a",
    "!!int x",
    "2020-13-45",
    "!!binary x",
    "!!timestamp x",
]
ODD_YAML += [
    "\0",
    '"\\0"',
    '"\\ud800"',
    "[" * 500,
    "!!python/object:os.system {}",
    "9" * 5000,
    "<<: 1",
    "%",
    "---\n---",
]


@pytest.mark.parametrize("text", ODD_YAML)
def test_any_text_is_a_value_or_refused_by_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    for path, overrides in (
        (str(tmp_path / "odd.yaml"), []),
        (None, [f"model.path={text}"]),
        (None, [f"model={text}"]),
    ):
        with pytest.raises(ConfigError) as caught:
            load_topology(path, overrides)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("device", ["cuda:²", "cuda:-1", "cuda:", "cuda: 1", "gpu", "MIG-1", "", "cpu:0", "CUDA:0"])
def test_what_is_no_device_is_refused_with_what_is_one(device: str) -> None:
    assert "a device is 'cpu' or 'cuda:N'" in why_no_device(device)
    topology = load_topology(
        None, [f"dp_config.router.prefill_schedulers.0.devices={msgspec.json.encode([device]).decode()}"]
    )
    with pytest.raises(ConfigError, match=r"prefill_schedulers\.0\.devices has"):
        judge(topology)


@pytest.mark.parametrize("key", ["scheduler.threads", "dp_config.router.prefill_schedulers.0.tp_size"])
def test_numbers_of_processes_have_a_bound(key: str) -> None:
    assert load_topology(None, [f"{key}=4096"])
    with pytest.raises(ConfigError, match=f"{key} must be an integer <= 4096"):
        load_topology(None, [f"{key}=4097"])


def test_an_index_of_a_list_has_plain_digits() -> None:
    with pytest.raises(ConfigError, match="must be an index"):
        load_topology(None, ["dp_config.router.prefill_schedulers.².port=1"])
