"""`pd_disaggregation.cluster_key` as a secret: where it may stand, how long it must be, and how a topology loses it.

Pure, except `with_own_key`. Called by `load.py`, `topology.py`, `net/curve.py` and the launchers. Invariant: no
sentence has the key in it.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from chitu.config.schema import Topology

KEY_PATH = "dp_config.router.pd_disaggregation.cluster_key"
ENVIRONMENT_KEY = "CHITU_CLUSTER_KEY"
API_KEYS = "CHITU_API_KEYS"
SECRETS = {KEY_PATH: ENVIRONMENT_KEY, "dp_config.router.api_keys": API_KEYS}
"""Key paths that no command line may set, and where they go instead."""
MIN_CHARS = 16


def why_refused(cluster_key: str) -> str | None:
    """What is wrong with a key that is not empty, one sentence."""
    if len(cluster_key) < MIN_CHARS:
        return (
            f"{KEY_PATH} ({ENVIRONMENT_KEY}) has {len(cluster_key)} characters: give at least {MIN_CHARS} random ones, "
            "such as those of `openssl rand -hex 32`"
        )
    return None


def secrets_in(data: Any) -> dict[str, Any]:
    """What plain YAML data has at the key paths of `SECRETS`, where it has anything."""
    found = {}
    for path in SECRETS:
        node = data
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node:
            found[path] = node
    return found


def cluster_key_of(topology: Topology) -> str:
    return topology.dp_config.router.pd_disaggregation.cluster_key


def with_cluster_key(topology: Topology, cluster_key: str) -> Topology:
    """The same topology with this key; empty: without one, fit to be written or shown."""
    router = topology.dp_config.router
    pd = msgspec.structs.replace(router.pd_disaggregation, cluster_key=cluster_key)
    router = msgspec.structs.replace(router, pd_disaggregation=pd)
    return msgspec.structs.replace(topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router))


def with_api_keys(topology: Topology, api_keys: tuple[str, ...]) -> Topology:
    """The same topology with these keys of clients."""
    router = msgspec.structs.replace(topology.dp_config.router, api_keys=api_keys)
    return msgspec.structs.replace(topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router))


def with_own_key(topology: Topology) -> Topology:
    """For a launcher that starts all processes of a cluster: where nobody gave a key it makes one, so that no other
    user of the machine takes part."""
    return topology if cluster_key_of(topology) else with_cluster_key(topology, secrets.token_hex(32))
