"""`pd_disaggregation.cluster_key` as a secret: where it may be set, how long it must be, and how to remove it.

Pure, except `with_own_key`. Called by `load.py`, `topology.py`, `net/curve.py` and the launchers. Invariant: no error
text contains the key.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from chitu.config.schema import Topology
from chitu.config.topology import with_router

KEY_PATH = "dp_config.router.pd_disaggregation.cluster_key"
ENVIRONMENT_KEY = "CHITU_CLUSTER_KEY"
API_KEYS = "CHITU_API_KEYS"
SECRETS = {KEY_PATH: ENVIRONMENT_KEY, "dp_config.router.api_keys": API_KEYS}
"""Key paths that no command line may set, with the environment variable to use instead."""
MIN_CHARS = 16


def why_refused(cluster_key: str) -> str | None:
    """Return one sentence on the error in a key that is not empty, or None."""
    if len(cluster_key) < MIN_CHARS:
        return (
            f"{KEY_PATH} ({ENVIRONMENT_KEY}) has {len(cluster_key)} characters: give at least {MIN_CHARS} random ones, "
            "such as those of `openssl rand -hex 32`"
        )
    return None


def secrets_in(data: Any) -> dict[str, Any]:
    """Return the values that plain YAML data has at the key paths of `SECRETS`."""
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
    """Return the same topology with this key. With an empty one it is safe to write or show."""
    pd = msgspec.structs.replace(topology.dp_config.router.pd_disaggregation, cluster_key=cluster_key)
    return with_router(topology, pd_disaggregation=pd)


def with_api_keys(topology: Topology, api_keys: tuple[str, ...]) -> Topology:
    """Return the same topology with these API keys of clients."""
    return with_router(topology, api_keys=api_keys)


def with_own_key(topology: Topology) -> Topology:
    """Return the topology with a new random key if it has none, so that no other user of the machine can join. For a
    launcher that starts all processes of a cluster."""
    return topology if cluster_key_of(topology) else with_cluster_key(topology, secrets.token_hex(32))
