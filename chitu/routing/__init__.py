"""Which instances serve a request: pure policies over the cluster view and the router's own load counts."""

from chitu.errors import ConfigError
from chitu.routing.least_loaded import least_loaded
from chitu.routing.policy import (
    Candidates,
    InstanceKey,
    InstanceLoad,
    Policy,
    RoutingRequest,
    Target,
    instance_key,
)
from chitu.routing.round_robin import round_robin

__all__ = [
    "Candidates",
    "InstanceKey",
    "InstanceLoad",
    "Policy",
    "RoutingRequest",
    "Target",
    "instance_key",
    "make_policy",
]


def make_policy(name: str) -> Policy:
    """The policy of that name in the configuration. ConfigError for any other."""
    policies: dict[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}
    if name not in policies:
        raise ConfigError(f"router.policy: {name!r} is none of {', '.join(sorted(policies))}")
    return policies[name]
