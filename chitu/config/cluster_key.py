"""`pd_disaggregation.cluster_key` as a secret: where it may stand, how long it must be, and how a topology loses it.

Pure. Called by `load.py`, `topology.py`, `net/curve.py` and the launchers. Invariant: no sentence has the key in it.
"""

from __future__ import annotations

import msgspec

from chitu.config.schema import Topology

KEY_PATH = "dp_config.router.pd_disaggregation.cluster_key"
ENVIRONMENT_KEY = "CHITU_CLUSTER_KEY"
MIN_CHARS = 16


def why_refused(cluster_key: str) -> str | None:
    """What is wrong with a key that is not empty, one sentence."""
    if len(cluster_key) < MIN_CHARS:
        return (
            f"{KEY_PATH} ({ENVIRONMENT_KEY}) has {len(cluster_key)} characters: give at least {MIN_CHARS} random ones, "
            "such as those of `openssl rand -hex 32`"
        )
    return None


def cluster_key_of(topology: Topology) -> str:
    return topology.dp_config.router.pd_disaggregation.cluster_key


def with_cluster_key(topology: Topology, cluster_key: str) -> Topology:
    """The same topology with this key; empty: without one, fit to be written or shown."""
    router = topology.dp_config.router
    pd = msgspec.structs.replace(router.pd_disaggregation, cluster_key=cluster_key)
    router = msgspec.structs.replace(router, pd_disaggregation=pd)
    return msgspec.structs.replace(topology, dp_config=msgspec.structs.replace(topology.dp_config, router=router))
