"""Request bodies of the operator's routes, with the rules of `ask/bodies.py`: drain, role, weights, adapters, pause,
sleep."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chitu.http.ask.bodies import note


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    instance: Annotated[str, note("name of the instance: `P0`, `D1`, `U0`")]
    force: Annotated[bool | None, note("true: also if no request could be served afterwards")] = None


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    instance: Annotated[str, note("name of the instance: `P0`, `D1`, `U0`")]
    role: Annotated[Literal["prefill", "decode", "unified"], note("the role that it gets")]
    force: Annotated[bool | None, note("true: also if no request could be served meanwhile")] = None


class CanaryBody(msgspec.Struct, forbid_unknown_fields=True):
    revision: Annotated[str, note("label of the revision; empty: each gets requests by the number of its instances")]
    share: Annotated[float, msgspec.Meta(ge=0, le=1), note("its share of the requests, while others can serve")] = 0.0


class WeightsBody(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, note("folder of safetensors files, by the same absolute path on every instance")]
    mixed: Annotated[
        bool | None, note("true: running requests go on with the new weights; otherwise they end before the change")
    ] = None
    timeout_s: Annotated[float | None, note("most seconds until all instances serve the weights; 600 by default")] = (
        None
    )


class AdaptersBody(msgspec.Struct, forbid_unknown_fields=True):
    load: Annotated[
        dict[str, str],
        note(
            "folders as PEFT writes them, by name, each by the same absolute path on every instance; another content "
            "under a name replaces what has it"
        ),
    ] = {}
    unload: Annotated[list[str], note("names that no request may choose any more")] = []
    timeout_s: Annotated[
        float | None,
        note("most seconds until all instances serve the new list and no request runs with others; 600 by default"),
    ] = None


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["finish", "keep"] | None,
        note("`finish`, the default: running requests end first; `keep`: they stop where they are"),
    ] = None
    timeout_s: Annotated[float | None, note("most seconds until they have ended; 600 by default")] = None


class ResumeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Has no fields."""


class SleepBody(msgspec.Struct, forbid_unknown_fields=True):
    level: Annotated[
        Literal[1, 2] | None,
        note("1, the default: the memory of KV pages is given back; 2: that of the weights, too, which are read again"),
    ] = None
    wake_on_request: Annotated[
        bool | None, note("false: requests do not wake the cluster, but are refused with `asleep`; true by default")
    ] = None
    timeout_s: Annotated[float | None, note("most seconds until all instances sleep; 600 by default")] = None


class WakeBody(msgspec.Struct, forbid_unknown_fields=True):
    timeout_s: Annotated[float | None, note("most seconds until all instances serve; 600 by default")] = None


class SnapshotBody(msgspec.Struct, forbid_unknown_fields=True):
    request_id: Annotated[str, note("the X-Request-Id, or the `id` of the answer")]


class ProfileBody(msgspec.Struct, forbid_unknown_fields=True):
    target: Annotated[str, note("name of an instance (`P0`), or a role: `prefill`, `decode`, `unified`")]
    steps: Annotated[int | None, note("most steps to record, up to 1000; 50 by default")] = None
    seconds: Annotated[float | None, note("most seconds to record, up to 60; 5 by default")] = None


OPERATOR_BODIES: dict[str, type[msgspec.Struct]] = {
    "/admin/drain": DrainBody,
    "/admin/role": RoleBody,
    "/admin/canary": CanaryBody,
    "/admin/weights": WeightsBody,
    "/admin/adapters": AdaptersBody,
    "/admin/pause": PauseBody,
    "/admin/resume": ResumeBody,
    "/admin/sleep": SleepBody,
    "/admin/wake": WakeBody,
    "/admin/snapshot": SnapshotBody,
    "/admin/profile": ProfileBody,
}
"""By route."""
