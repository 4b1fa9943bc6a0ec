"""The environment of the transfer libraries, from the topology. Pure.

Called by the topology check, and by the process that opens the transports. A variable's value is, in this order: what
chitu relies on, else the topology's, else that of the process, else chitu's default. What has a key of its own is
rejected here, so that there is one way to say it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from chitu.config.schema import PDDisaggregationConfig

PD = "dp_config.router.pd_disaggregation"
PREFIXES = ("MC_", "UCX_", "NIXL_")
OWN_KEYS = {
    "MC_GID_INDEX": "gid_index",
    "UCX_IB_GID_INDEX": "gid_index",
    "MC_TE_FILTERS": "ib_device",
    "MC_FORCE_TCP": "mooncake_protocol",
    "MC_FORCE_HCA": "mooncake_protocol",
}
"""Variables that have a key of their own."""
RELIED_ON = frozenset(
    {
        "MC_TRANSFER_TIMEOUT",
        "MC_SLICE_TIMEOUT",
        "MC_TCP_LANES_PER_PEER",
        "MC_NUM_TCP_IO_THREADS",
        "MC_TCP_PROGRESS_TIMEOUT_SEC",
        "MC_TCP_STATUS_TIMEOUT_SEC",
        "MC_USE_IPV6",
        "MC_USE_TENT",
        "MC_USE_TEV1",
    }
)
"""Variables whose values the fences of writes rest on, or the way in which the engine is called."""
LIMITS = ("UCX_TLS", "UCX_NET_DEVICES")
"""Variables that limit what UCX may use."""


def transport_problems(pd: PDDisaggregationConfig) -> Iterator[str]:
    """Yield a sentence for each setting that cannot work."""
    for name in pd.ib_device:
        if not name or set(name) & set(", :/\t\n"):
            yield f"{PD}.ib_device has {name!r}, which is no name of a device: give a list, such as [mlx5_0, mlx5_1]"
    for name, value in pd.transport_env.items():
        key = f"{PD}.transport_env.{name}"
        if not name.startswith(PREFIXES):
            yield f"{key}: only variables of Mooncake and NIXL are set here ({', '.join(PREFIXES)}...)"
        elif name in OWN_KEYS:
            yield f"{key} has a key of its own: {PD}.{OWN_KEYS[name]}"
        elif name in RELIED_ON:
            yield f"{key} cannot be set: chitu sets it, because the safety of late writes rests on it"
        elif name == "UCX_NET_DEVICES" and pd.ib_device:
            yield f"{key} and {PD}.ib_device both name devices: leave one of them out"
        elif value == "":
            yield f"{key} is empty: give a value, or leave it out"


def ucx_limits(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `given` that limit what UCX may use."""
    return {name: given[name] for name in LIMITS if name in given}


def transport_environment(pd: PDDisaggregationConfig) -> dict[str, str]:
    """Return the variables that the topology gives to the transfer libraries."""
    index = {} if pd.gid_index is None else {"MC_GID_INDEX": pd.gid_index, "UCX_IB_GID_INDEX": pd.gid_index}
    return {name: str(value) for name, value in (pd.transport_env | index).items()}
