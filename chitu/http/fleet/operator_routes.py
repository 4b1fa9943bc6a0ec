"""The operator's calls: drain, roles, caches, weights, pause, sleep, snapshots. Loop thread."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chitu.cluster.cluster import Cluster
from chitu.config.cluster_key import with_api_keys, with_cluster_key
from chitu.config.schema import Topology
from chitu.config.topology import changed_keys
from chitu.errors import InvalidRequest
from chitu.http.answer.kept_requests import KeptRequests
from chitu.http.ask.reader import read_body
from chitu.http.fleet.bodies import (
    CanaryBody,
    DrainBody,
    PauseBody,
    ProfileBody,
    ResumeBody,
    RoleBody,
    SleepBody,
    SnapshotBody,
    WakeBody,
    WeightsBody,
)
from chitu.http.fleet.replies import StatusReply
from chitu.http.wire.access import Access
from chitu.http.wire.routes import BINARY, Route, json_response
from chitu.protocol.admin import Canary, DrainReply, ProfileReply, RoleReply, SleepState, WeightsState
from chitu.types import Role

MAX_CHANGE_S = 86_400.0
DEFAULT_CHANGE_S = 600.0
MAX_PROFILE_STEPS, DEFAULT_PROFILE_STEPS = 1000, 50
MAX_PROFILE_S, DEFAULT_PROFILE_S = 60.0, 5.0


def operator_routes(cluster: Cluster, topology: Topology, kept: KeptRequests | None, access: Access) -> list[Route]:
    """Return an operator's calls. `topology`: the running one, with the router's actual ports. `kept`: None if there is
    no folder of kept requests."""

    async def drain(request: Request) -> Response:
        """Send an instance no new requests. It finishes its requests, leaves the cluster and ends its process with 0.
        Idempotent; `GET /cluster` shows it as `draining`, then as `down`."""
        body = await read_body(request, DrainBody)
        return json_response(await cluster.drain(body.instance, body.force is True))

    async def role(request: Request) -> Response:
        """Have an instance become a P, a D or a unified instance. It gets no new requests, finishes its own (those that
        take longer than `deadlines.role_change_s` go on elsewhere), and joins under another name and incarnation; its
        process, weights and cached prefixes stay. `GET /cluster` shows it as `draining`, and what it becomes."""
        body = await read_body(request, RoleBody)
        return json_response(await cluster.change_role(body.instance, Role(body.role), body.force is True))

    async def canary(request: Request) -> Response:
        """Send a share of the requests to one revision of the instances (`revision` in the topology), by this router.
        `share` 0 takes all requests from it, an empty `revision` ends the choice. `GET /cluster` shows the revisions.
        """
        body = await read_body(request, CanaryBody)
        return json_response(cluster.set_canary(Canary(body.revision, body.share)))

    async def flush_caches(request: Request) -> Response:
        """Make every instance forget its cached prefixes. Running requests keep the pages that they use, and no other
        request finds these. The command is part of the cluster view, which is repeated, so every instance receives it:
        within about a heartbeat `pages_cached` in `GET /cluster` is 0 if nothing runs."""
        await cluster.flush_caches()
        return json_response(StatusReply("flushing"))

    async def change_weights(request: Request) -> Response:
        """Have the cluster compute with the weights in another folder, of a model of the same kind. Every instance
        reads and checks them first, while requests are served; then new requests wait, running ones end, and all
        instances change at once, with empty caches. If one cannot, nothing is changed."""
        body = await read_body(request, WeightsBody)
        if not body.path.startswith("/"):
            raise InvalidRequest(f"path: {body.path!r} is no absolute path", "path")
        state = await cluster.change_weights(body.path, body.mixed is True, timeout_of(body.timeout_s))
        return json_response(state)

    async def pause(request: Request) -> Response:
        """Have new requests wait at all routers, and return when the running ones have ended or, with `keep`, have
        stopped where they are."""
        body = await read_body(request, PauseBody)
        return json_response(await cluster.pause(body.mode or "finish", timeout_of(body.timeout_s)))

    async def resume(request: Request) -> Response:
        """End a pause, whichever router was asked for it: requests go on where they are, and those that waited start in
        their order."""
        if await request.body():
            await read_body(request, ResumeBody)
        return json_response(await cluster.pause("", MAX_CHANGE_S))

    async def sleep(request: Request) -> Response:
        """Give back the memory of KV pages and, at level 2, of weights, on all instances, once running requests have
        ended. A request that comes to any router wakes the cluster, unless `wake_on_request` is false."""
        body = SleepBody()
        if await request.body():
            body = await read_body(request, SleepBody)
        level, stays = body.level or 1, body.wake_on_request is False
        return json_response(await cluster.sleep(level, timeout_of(body.timeout_s), stays=stays))

    async def wake(request: Request) -> Response:
        """End a sleep, whichever router was asked for it, and return when all instances serve: after level 2 they read
        their weights again. One that finds other ones in its folder stays out, and `missing` says why."""
        body = WakeBody()
        if await request.body():
            body = await read_body(request, WakeBody)
        return json_response(await cluster.wake(timeout_of(body.timeout_s)))

    async def take_snapshot(request: Request) -> Response:
        """Return a running request as a file from which another router can continue it (`router.kept_requests.dir`).
        The request runs on."""
        body = await read_body(request, SnapshotBody)
        if kept is None:
            raise InvalidRequest("this router has no router.kept_requests.dir, so it keeps no bodies for snapshots")
        return Response(kept.snapshot(body.request_id, access.trace_tenant(request.scope)), media_type=BINARY)

    async def profile(request: Request) -> Response:
        """Have an instance, or all of a role, record what each of their ranks computes with torch's profiler, for some
        steps and at most some seconds, into `trace.profile_dir` on their machines. One profile at a time. Requests are
        answered meanwhile, more slowly."""
        body = await read_body(request, ProfileBody)
        if topology.trace.profile_dir is None:
            raise InvalidRequest("trace.profile_dir is not set: there is no folder for profiles")
        steps = DEFAULT_PROFILE_STEPS if body.steps is None else body.steps
        seconds = DEFAULT_PROFILE_S if body.seconds is None else body.seconds
        if not 1 <= steps <= MAX_PROFILE_STEPS:
            raise InvalidRequest(f"steps: {steps} is not within 1 and {MAX_PROFILE_STEPS}", "steps")
        if not 0 < seconds <= MAX_PROFILE_S:
            raise InvalidRequest(f"seconds: {seconds} is not within 0 and {MAX_PROFILE_S:g}", "seconds")
        return json_response(cluster.profile(body.target, seconds, steps))

    async def topology_with_ports(request: Request) -> Response:
        """Return the running topology with the router's actual ports and without keys: `chitu join` starts an instance
        of it. Keys at their defaults are left out."""
        return json_response(changed_keys(with_api_keys(with_cluster_key(topology, ""), ())))

    return [
        Route("POST", "/admin/drain", drain, DrainReply, (403, 404, 409)),
        Route("POST", "/admin/role", role, RoleReply, (403, 404, 409)),
        Route("POST", "/admin/canary", canary, Canary, (403, 404)),
        Route("POST", "/admin/cache/flush", flush_caches, StatusReply, (403,)),
        Route("POST", "/admin/weights", change_weights, WeightsState, (403, 409)),
        Route("POST", "/admin/pause", pause, WeightsState, (403, 504)),
        Route("POST", "/admin/resume", resume, WeightsState, (403,)),
        Route("POST", "/admin/sleep", sleep, SleepState, (403, 409, 504)),
        Route("POST", "/admin/wake", wake, SleepState, (403, 504)),
        Route("POST", "/admin/snapshot", take_snapshot, None, (403, 404), (BINARY,)),
        Route("POST", "/admin/profile", profile, ProfileReply, (403, 404, 409)),
        Route("GET", "/admin/topology", topology_with_ports, None, (403,)),
    ]


def timeout_of(wanted_s: float | None) -> float:
    """Return how long a change may take. Raises InvalidRequest for a time that is out of bounds."""
    if wanted_s is not None and not 0 < wanted_s <= MAX_CHANGE_S:
        raise InvalidRequest(f"timeout_s: {wanted_s} is not within 0 and {MAX_CHANGE_S:g}", "timeout_s")
    return DEFAULT_CHANGE_S if wanted_s is None else wanted_s
