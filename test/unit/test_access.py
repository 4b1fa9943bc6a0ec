"""Who may call which route of the API port, and how often."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import FakeClock

from chitu.config.schema import AdmissionConfig, RouterConfig
from chitu.errors import ChituError, Forbidden, InvalidRequest, RateLimited, Unauthorized
from chitu.http.wire.access import SALT_BYTES, Access
from chitu.net.curve import derive
from chitu.net.fair_share import RateLimiter
from chitu.net.http import error_headers
from chitu.protocol import MAX_PRIORITY

SECRETS = derive("a key of more than sixteen characters")
assert SECRETS is not None
TOKEN = SECRETS.token
LOCAL, FAR = ("127.0.0.1", 5000), ("10.0.0.9", 5000)


def request(
    path: str, credential: str | None = None, client: tuple[str, int] | None = LOCAL, **headers: str
) -> dict[str, Any]:
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    if credential is not None:
        given.append((b"authorization", f"Bearer {credential}".encode()))
    return {"type": "http", "path": path, "client": client, "headers": given}


def access(
    *, keys: tuple[str, ...] = (), salts: tuple[str, ...] = (), has_cluster_key: bool = False, **admission: float
) -> tuple[Access, FakeClock]:
    clock = FakeClock()
    config = RouterConfig(api_keys=keys, api_key_salts=salts, admission=AdmissionConfig(**admission))  # type: ignore[arg-type]
    return Access(config, SECRETS if has_cluster_key else None, clock), clock


def verdict(guard: Access, scope: dict[str, Any]) -> type[ChituError] | None:
    try:
        guard.require(scope)
    except ChituError as error:
        return type(error)
    return None


@pytest.mark.parametrize("path", ["/", "/health", "/livez", "/web/chat.js"])
def test_probes_and_the_page_need_no_key(path: str) -> None:
    assert verdict(access(keys=("sk",), has_cluster_key=True)[0], request(path, client=FAR)) is None


@pytest.mark.parametrize(
    ("credential", "expected"),
    [(None, Unauthorized), ("", Unauthorized), ("wrong", Unauthorized), ("sk-2", None), (TOKEN, None)],
)
def test_api_keys_open_the_rest_and_so_does_the_token(
    credential: str | None, expected: type[ChituError] | None
) -> None:
    guard, _ = access(keys=("sk-1", "sk-2"), has_cluster_key=True)
    assert verdict(guard, request("/v1/completions", credential)) is expected
    assert verdict(guard, request("/cluster", credential)) is expected


def test_each_api_key_has_cached_pages_of_its_own_unless_the_configuration_says_who_shares_them() -> None:
    def salts_of(guard: Access, credentials: tuple[str, ...]) -> list[str]:
        return [guard.cache_salt(request("/v1/completions", credential)) for credential in credentials]

    credentials = ("sk-1", "sk-2", "sk-3", TOKEN)
    own = salts_of(access(keys=credentials[:3], has_cluster_key=True)[0], credentials)
    shared = salts_of(access(keys=credentials[:3], salts=("a", "b", "a"), has_cluster_key=True)[0], credentials)
    assert len(set(own)) == 4 and shared[0] == shared[2] and len(set(shared)) == 3
    # Salts are hashes of one length: none is a prefix of another or reveals its key, and no own salt is a shared one.
    assert {len(salt) for salt in own + shared} == {2 * SALT_BYTES} and not set(own[:3]) & set(shared)
    assert salts_of(access(has_cluster_key=True)[0], ("anything", TOKEN)) == ["", ""]


def test_without_api_keys_everybody_may_generate_but_not_administrate() -> None:
    guard, _ = access(has_cluster_key=True)
    assert verdict(guard, request("/v1/completions", client=FAR)) is None
    assert verdict(guard, request("/admin/drain")) is Unauthorized


@pytest.mark.parametrize(
    ("keys", "has_cluster_key", "credential", "client", "expected"),
    [
        ((), True, TOKEN, FAR, None),
        ((), True, TOKEN[:-1] + ("0" if TOKEN[-1] != "0" else "1"), LOCAL, Unauthorized),
        (("sk",), True, "sk", LOCAL, Unauthorized),  # a user's key is not an operator's
        (("sk",), True, TOKEN, FAR, None),
        (("sk",), False, "sk", FAR, None),
        (("sk",), False, None, LOCAL, Unauthorized),
        ((), False, None, LOCAL, None),
        ((), False, None, ("::1", 1), None),
        ((), False, None, ("::ffff:127.0.0.1", 1), None),
        ((), False, None, FAR, Forbidden),
        ((), False, None, None, Forbidden),
        ((), False, TOKEN, FAR, Forbidden),
    ],
)
def test_admin_calls(
    keys: tuple[str, ...],
    has_cluster_key: bool,
    credential: str | None,
    client: tuple[str, int] | None,
    expected: type[ChituError] | None,
) -> None:
    guard, _ = access(keys=keys, has_cluster_key=has_cluster_key)
    assert verdict(guard, request("/admin/drain", credential, client)) is expected


def test_a_web_page_in_a_browser_of_this_machine_cannot_administrate() -> None:
    assert verdict(access()[0], request("/admin/drain", origin="http://127.0.0.1:21003")) is Forbidden


def test_the_rate_is_per_client_and_says_when_to_come_back() -> None:
    guard, clock = access(requests_per_s=2.0, burst=3)
    for _ in range(3):
        guard.count(request("/v1/completions", client=FAR))
    with pytest.raises(RateLimited) as caught:
        guard.count(request("/v1/completions", client=FAR))
    assert caught.value.http_status == 429
    assert caught.value.retry_after_s == pytest.approx(0.5)
    assert error_headers(caught.value) == [(b"retry-after", b"1")]
    guard.count(request("/v1/completions", client=("10.0.0.10", 1)))
    clock.advance(0.5)
    guard.count(request("/v1/completions", client=FAR))
    with pytest.raises(RateLimited):
        guard.count(request("/v1/completions", client=FAR))


def test_with_api_keys_the_rate_is_the_keys_wherever_it_comes_from() -> None:
    guard, _ = access(keys=("a", "b"), requests_per_s=1.0, burst=1)
    guard.count(request("/v1/completions", "a", FAR))
    with pytest.raises(RateLimited):
        guard.count(request("/v1/completions", "a", LOCAL))
    guard.count(request("/v1/completions", "b", LOCAL))


def test_a_network_of_ipv6_addresses_is_one_client() -> None:
    guard, _ = access(requests_per_s=1.0, burst=1)
    guard.count(request("/v1/completions", client=("2001:db8::1", 1)))
    with pytest.raises(RateLimited):
        guard.count(request("/v1/completions", client=("2001:db8::ffff", 1)))
    guard.count(request("/v1/completions", client=("2001:db8:0:1::1", 1)))


def test_without_a_rate_nothing_is_counted() -> None:
    guard, _ = access()
    for _ in range(10_000):
        guard.count(request("/v1/completions"))


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60), st.floats(0.1, 50), st.integers(1, 10), st.integers(1, 20))
def test_no_client_gets_more_than_burst_and_rate_allow(
    pauses_s: list[float], per_s: float, burst: int, tries: int
) -> None:
    clock = FakeClock()
    limiter: RateLimiter[str] = RateLimiter(clock, per_s, burst)
    taken = 0
    for pause_s in pauses_s:
        clock.advance(pause_s)
        waits = [limiter.take("c") for _ in range(tries)]
        taken += waits.count(0.0)
        assert taken <= burst + clock.monotonic() * per_s + 1e-6
        if waits[-1]:  # a client that waits as long as it was told gets through
            clock.advance(waits[-1] + 1e-9)
            assert limiter.take("c") == 0.0
            taken += 1


def test_a_flood_of_clients_does_not_grow_memory() -> None:
    limiter: RateLimiter[int] = RateLimiter(FakeClock(), 1.0, 1, max_buckets=100)
    for client in range(10_000):
        assert limiter.take(client) == 0.0
    assert len(limiter) == 100
    assert limiter.take(9_999) > 0


@pytest.mark.parametrize(
    ("keys", "credential", "client", "headers", "expected"),
    [
        ((), None, LOCAL, {}, None),
        ((), None, FAR, {}, Forbidden),
        ((), "sk", FAR, {}, Forbidden),
        ((), TOKEN, FAR, {}, None),
        ((), None, LOCAL, {"origin": "http://evil.example"}, Forbidden),
        (("sk",), None, LOCAL, {}, Unauthorized),
        (("sk",), "sk", FAR, {}, None),
        (("sk",), TOKEN, FAR, {}, None),
    ],
)
def test_traces_are_shown_to_this_machine_to_keys_and_to_the_operator(
    keys: tuple[str, ...],
    credential: str | None,
    client: tuple[str, int],
    headers: dict[str, str],
    expected: type[ChituError] | None,
) -> None:
    guard = access(keys=keys, has_cluster_key=True)[0]
    assert verdict(guard, request("/trace/r", credential, client, **headers)) is expected


def test_a_key_sees_the_traces_of_its_own_requests_alone() -> None:
    guard = access(keys=("sk-1", "sk-2"), has_cluster_key=True)[0]
    first, second = (guard.trace_tenant(request("/trace/r", key)) for key in ("sk-1", "sk-2"))
    assert first and second and first != second
    assert first == guard.cache_salt(request("/v1/completions", "sk-1"))
    assert guard.trace_tenant(request("/trace/r", TOKEN)) is None
    assert access()[0].trace_tenant(request("/trace/r")) is None


def allowed(guard: Access, priority: int, credential: str | None) -> bool:
    try:
        guard.require_priority(request("/v1/completions", credential), priority)
    except InvalidRequest as error:
        assert error.param == "priority" and str(priority) in error.message and "router.min_priority" in error.message
        return False
    return True


def test_no_client_goes_ahead_of_the_default_priority_unless_the_topology_allows_it() -> None:
    guard = Access(RouterConfig(), SECRETS, FakeClock())
    assert [allowed(guard, priority, None) for priority in (MAX_PRIORITY, 0, -1)] == [True, True, False]
    assert allowed(guard, -MAX_PRIORITY, TOKEN), "the operator"
    assert not allowed(guard, -1, "no token") and not allowed(Access(RouterConfig(), None, FakeClock()), -1, "")
    assert allowed(Access(RouterConfig(min_priority=-3), None, FakeClock()), -3, None)
    assert not allowed(Access(RouterConfig(min_priority=-3), None, FakeClock()), -4, None)


def test_each_api_key_has_its_bound_of_priorities() -> None:
    keys = {"api_keys": ("sk-1", "sk-2", "sk-3"), "api_key_salts": ("x", "y", "x")}
    config = RouterConfig(**keys, min_priority=-9, api_key_min_priorities=(-2, 0, -5))
    guard = Access(config, SECRETS, FakeClock())
    for key, bound in (("sk-1", -2), ("sk-2", 0), ("sk-3", -5), (TOKEN, -MAX_PRIORITY)):
        assert allowed(guard, bound, key) and allowed(guard, 7, key)
        assert bound == -MAX_PRIORITY or not allowed(guard, bound - 1, key)
    assert allowed(Access(RouterConfig(**keys, min_priority=-9), None, FakeClock()), -9, "sk-2"), "one for all"


def test_a_kept_request_has_no_priority_that_no_key_of_its_tenant_may_have() -> None:
    keys = {"api_keys": ("sk-1", "sk-2", "sk-3"), "api_key_salts": ("x", "y", "x")}
    guard = Access(RouterConfig(**keys, api_key_min_priorities=(-2, 0, -5)), SECRETS, FakeClock())
    first, second, operator = (guard.cache_salt(request("/", key)) for key in ("sk-1", "sk-2", TOKEN))
    guard.require_kept_priority(first, -5)
    guard.require_kept_priority(second, 0)
    guard.require_kept_priority(operator, -MAX_PRIORITY)
    for tenant, priority in ((first, -6), (second, -1)):
        with pytest.raises(InvalidRequest):
            guard.require_kept_priority(tenant, priority)
    Access(RouterConfig(), SECRETS, FakeClock()).require_kept_priority("", -7)  # whoever asked


def test_a_batch_has_the_bounds_of_the_key_that_made_it() -> None:
    """Also by another router, and none that single keys may have once its key is gone."""
    keys = {"api_keys": ("sk-1", "sk-2"), "api_key_salts": ("x", "x"), "api_key_min_priorities": (-9, 0)}
    guard, again = (Access(RouterConfig(**keys), SECRETS, FakeClock()) for _ in range(2))
    scopes = [request("/v1/batches", key) for key in ("sk-1", "sk-2", TOKEN)]
    names = [guard.key_name(scope) for scope in scopes]
    assert len(set(names)) == 3 and not any("sk-" in name or TOKEN in name for name in names)
    for scope, name, bound in zip(scopes, names, (-9, 0, -MAX_PRIORITY), strict=True):
        credential = again.credential_of(guard.cache_salt(scope), name)
        assert credential is not None
        assert again.cache_salt(request("/", credential.decode())) == guard.cache_salt(scope)
        assert allowed(again, bound, credential.decode())
        assert bound == -MAX_PRIORITY or not allowed(again, bound - 1, credential.decode())

    fewer = {"api_keys": ("sk-1",), "api_key_salts": ("x",), "api_key_min_priorities": (-9,)}
    left = Access(RouterConfig(**fewer, min_priority=-20), SECRETS, FakeClock())
    for name in (names[1], "", "unknown"):
        credential = left.credential_of(guard.cache_salt(scopes[1]), name)
        assert credential is not None and left.cache_salt(request("/", credential.decode()))
        assert allowed(left, 0, credential.decode()) and not allowed(left, -1, credential.decode())
        assert verdict(left, request("/v1/models", credential.decode())) is Unauthorized, "no client has it"
    moved = Access(RouterConfig(api_keys=("sk-1", "sk-2"), api_key_salts=("y", "z")), SECRETS, FakeClock())
    assert moved.credential_of(guard.cache_salt(scopes[1]), names[1]) is None, "the tenant is gone"


def test_without_api_keys_only_the_token_has_a_name() -> None:
    guard = access(has_cluster_key=True)[0]
    name = guard.key_name(request("/v1/batches", TOKEN))
    assert guard.credential_of("", name) == TOKEN.encode() and guard.key_name(request("/v1/batches", "k")) == ""
    assert guard.credential_of("", "") == b"" and access()[0].credential_of("", name) == b""


def test_keys_with_one_salt_are_one_tenant() -> None:
    assert access()[0].num_tenants == access(keys=("a",), has_cluster_key=True)[0].num_tenants == 1
    assert access(keys=("a", "b", "c"))[0].num_tenants == 3
    assert access(keys=("a", "b", "c"), salts=("x", "y", "x"))[0].num_tenants == 2
