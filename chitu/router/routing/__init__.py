"""Routing: pure policies that choose instances, the selector that feeds them, and admission."""

from chitu.config.schema import RouterConfig
from chitu.errors import ConfigError
from chitu.router.routing.admission import Admission
from chitu.router.routing.breaker import NO_INSTANCES, Breakers, BreakerState
from chitu.router.routing.least_loaded import least_loaded
from chitu.router.routing.policy import (
    Candidates,
    InstanceGroup,
    InstanceKey,
    Policy,
    RoutingRequest,
    Target,
    instance_key,
)
from chitu.router.routing.power_of_two import power_of_two
from chitu.router.routing.prefix_affinity import prefix_affinity
from chitu.router.routing.round_robin import round_robin
from chitu.router.routing.selector import PairSelector

__all__ = [
    "NO_INSTANCES",
    "Admission",
    "BreakerState",
    "Breakers",
    "Candidates",
    "InstanceGroup",
    "InstanceKey",
    "PairSelector",
    "Policy",
    "RoutingRequest",
    "Target",
    "instance_key",
    "make_policy",
    "make_selector",
]

POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_affinity": prefix_affinity,
}


def make_policy(name: str) -> Policy:
    """Return the policy of that name in the configuration. Raises ConfigError for any other name."""
    if name not in POLICIES:
        raise ConfigError(f"router.policy: {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]


def make_selector(config: RouterConfig, first_turn: int = 0) -> PairSelector:
    """Build the selector that `policy`, `prefill_policy` and `decode_policy` ask for. Prefix affinity as `policy` is
    for P only: D is then the least loaded.

    `first_turn`: where round robin begins; several routers that begin apart do not all send to the same instance.
    """
    of_both = config.policy
    prefill = config.prefill_policy or of_both
    decode = config.decode_policy or ("least_loaded" if of_both == "prefix_affinity" else of_both)
    return PairSelector(make_policy(prefill), make_policy(decode), first_turn=first_turn)
