"""Access to the API port: API keys, the cluster's token, rate limits. Loop thread. It decides, and sends no answers.

The page, `/health` and `/livez` are open to all. If `api_keys` are configured, everything else requires one of them. An
operator's calls (`/admin/...`) require the cluster's token if the cluster has a key, since API keys are for its users.
Without a cluster key they require an API key; with neither, they must come from this machine and not from a web page.
The token is accepted wherever an API key is, and either may come in X-API-Key. Secrets are compared in constant time.

An API key belongs to a tenant (`api_key_salts`). It sees the requests of its tenant alone, in any route; the
operator sees all. Without API keys all clients see all requests, except their traces, which are for this machine.
"""

from __future__ import annotations

import ipaddress
import os
from hashlib import blake2b

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import Forbidden, InvalidRequest, RateLimited, Unauthorized
from chitu.http.wire.limits import PROBE_PATHS
from chitu.net.curve import ClusterSecrets
from chitu.net.fair_share import RateLimiter
from chitu.net.http import Scope, bearer, header, is_bearer

OPEN_PATHS = frozenset({"/", *PROBE_PATHS})
"""Paths open to all, for probes and browsers, which have no key."""
OPEN_FOLDER = "/web/"
"""The page's files, which are in every copy of the project."""
ADMIN_FOLDER = "/admin/"
TRACE_FOLDER = "/trace/"
"""Records of requests, with their tokens."""
API_KEY = (
    "an API key is required: Authorization: Bearer KEY, or X-API-Key: KEY",
    "the API key is not one of this server's",
)
TOKEN = (
    "the cluster's token is required: Authorization: Bearer TOKEN, which `chitu token` prints to the cluster's user on "
    "its machine (elsewhere with CHITU_CLUSTER_KEY set)",
    "the token is not that of this cluster's key; `chitu token` prints it",
)
"""Messages for a missing key, and for a wrong one."""
SALT_BYTES = 16
"""Size of the prefix of a request's own salt. All are equally long, so that two tenants cannot have the same salt."""
IPV6_NETWORK_BYTES = 8
"""Bytes of an IPv6 address that identify a client, which has a whole /64 of addresses."""


def _authorization(scope: Scope) -> bytes | None:
    """Return the header Authorization, or what it would be for the key in X-API-Key, as some clients send it."""
    given = header(scope, b"authorization")
    if given is None and (key := header(scope, b"x-api-key")) is not None:
        return b"Bearer " + key
    return given


class Access:
    def __init__(self, config: RouterConfig, secrets: ClusterSecrets | None, clock: Clock) -> None:
        self._token = [secrets.token.encode()] if secrets is not None else []
        self._api_keys = [key.encode() for key in config.api_keys]
        self._salts = _salts(config, self._token)
        self._min_priority = config.min_priority
        self._min_priorities = dict(zip(self._api_keys, config.api_key_min_priorities, strict=False))
        self._by_name = {_name_of(key): key for key in (*self._api_keys, *self._token)}
        self._heirs = {salt: os.urandom(32).hex().encode() for salt in self._salts.values()}
        """Credentials that stand for keys that are gone, by tenant; no client has them."""
        self._salts |= {heir: salt for salt, heir in self._heirs.items()}
        if self._min_priorities:
            self._min_priorities |= dict.fromkeys(self._heirs.values(), 0)
        per_s, burst = config.admission.requests_per_s, config.admission.burst
        self._limiter: RateLimiter[bytes] | None = RateLimiter(clock, per_s, burst) if per_s else None

    def require(self, scope: Scope) -> None:
        """Raise Unauthorized or Forbidden if the request may not be answered."""
        path: str = scope["path"]
        if path.startswith(ADMIN_FOLDER):
            self._require_operator(scope, _authorization(scope))
        elif path.startswith(TRACE_FOLDER) and not self._api_keys:
            if not is_bearer(_authorization(scope), self._token):
                _require_local(scope, "without api_keys, traces are shown with the cluster's token, or to this machine")
        elif self._api_keys and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            _require(_authorization(scope), [*self._api_keys, *self._token], *API_KEY)

    def count(self, scope: Scope) -> None:
        """Raise RateLimited if the client requests more generations than its share. Call after `require`."""
        if self._limiter is None:
            return  # parsing the client's address costs as much as parsing the request's JSON
        wait_s = self._limiter.take(self.client(scope))
        if wait_s:
            raise RateLimited("too many requests a second (router.admission.requests_per_s); try again later", wait_s)

    def cache_salt(self, scope: Scope) -> str:
        """Return the prefix of the request's own `cache_salt`, which differs between tenants. Empty if no key is
        required. Call after `require`."""
        return self._salts.get(bearer(_authorization(scope)) or b"", "") if self._salts else ""

    @property
    def num_tenants(self) -> int:
        """How many tenants the API keys have; 1 if none is required."""
        return max(1, len({self._salts[key] for key in self._api_keys}))

    def key_name(self, scope: Scope) -> str:
        """Return a name of the request's key for `credential_of`, which does not reveal the key; empty if it has none.
        Call after `require`."""
        name = _name_of(bearer(_authorization(scope)) or b"")
        return name if name in self._by_name else ""

    def credential_of(self, tenant: str, key_name: str) -> bytes | None:
        """Return the credential for what a tenant's key has the router do later: empty if none is required; None if the
        tenant has no key any more. If only this key is gone, it is one that may ask for no priority that single keys
        may have."""
        key = self._by_name.get(key_name)
        if not self._api_keys:
            return key or b""
        return key if key is not None and self._salts[key] == tenant else self._heirs.get(tenant)

    def trace_tenant(self, scope: Scope) -> str | None:
        """Return the tenant whose requests the caller may see (records, traces, snapshots); None: those of all. Call
        after `require`."""
        is_operator = is_bearer(_authorization(scope), self._token)
        return None if is_operator or not self._api_keys else self.cache_salt(scope)

    def require_priority(self, scope: Scope, priority: int) -> None:
        """Raise InvalidRequest if the client may not ask for this priority. The lowest goes first; none from 0 on is
        refused. Call after `require`."""
        if priority < self._min_priority or self._min_priorities:
            authorization = _authorization(scope)
            if not is_bearer(authorization, self._token):
                key = bearer(authorization) or b""
                _require_priority(priority, self._min_priorities.get(key, self._min_priority))

    def require_kept_priority(self, tenant: str, priority: int) -> None:
        """Raise InvalidRequest if no key of a tenant may ask for the priority of its kept request. Without API keys it
        is not known who asked, so what an earlier router took is taken."""
        keys = [key for key in self._api_keys if self._salts[key] == tenant]
        if keys:
            _require_priority(priority, min(self._min_priorities.get(key, self._min_priority) for key in keys))

    def _require_operator(self, scope: Scope, authorization: bytes | None) -> None:
        if self._token:
            _require(authorization, self._token, *TOKEN)
        elif self._api_keys:
            _require(authorization, [*self._api_keys, *self._token], *API_KEY)
        else:
            _require_local(scope, "without cluster_key or api_keys, admin calls are accepted from this machine")

    def client(self, scope: Scope) -> bytes:
        """Return whose share of the router a request takes: that of its API key if keys are required, else of its
        address."""
        if self._api_keys:
            return bearer(_authorization(scope)) or b""
        address = _address(scope)
        if address is None:
            return b""
        return address.packed if address.version == 4 else address.packed[:IPV6_NETWORK_BYTES]


def _name_of(key: bytes) -> str:
    return blake2b(key, digest_size=SALT_BYTES, person=b"name of a key").hexdigest()


def _salts(config: RouterConfig, tokens: list[bytes]) -> dict[bytes, str]:
    """Return the salts by credential; empty if none is required. A key is a tenant of its own, or shares one with the
    keys that have the same entry in `api_key_salts`. Salts are hashes, since instances need not know the keys."""
    keys = [key.encode() for key in config.api_keys]
    if not keys:
        return {}
    salts = [b"salt" + salt.encode() for salt in config.api_key_salts] or [b"key" + key for key in keys]
    tenants = [*zip(keys, salts, strict=True), *((token, b"key" + token) for token in tokens)]
    return {key: blake2b(tenant, digest_size=SALT_BYTES).hexdigest() for key, tenant in tenants}


def _require_priority(priority: int, bound: int) -> None:
    if priority < bound:
        raise InvalidRequest(
            f"priority: {priority} is below {bound}, the lowest that this client may ask for (router.min_priority); "
            "the lowest number goes first, and 0 is the default",
            "priority",
        )


def _require(authorization: bytes | None, known: list[bytes], missing: str, wrong: str) -> None:
    if bearer(authorization) is None:
        raise Unauthorized(missing)
    if not is_bearer(authorization, known):
        raise Unauthorized(wrong)


def _require_local(scope: Scope, rule: str) -> None:
    if header(scope, b"origin") is not None or not _is_local(scope):
        raise Forbidden(f"{rule} alone, and not from web pages")


def _address(scope: Scope) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_local(scope: Scope) -> bool:
    address = _address(scope)
    return address is not None and address.is_loopback
