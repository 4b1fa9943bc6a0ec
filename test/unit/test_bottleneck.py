"""`chitu explain` on snapshots made by hand: edge cases, and cases that a real cluster does not easily get into.
`test_explain.py` has bottlenecks of real clusters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.errors import ConfigError
from chitu.protocol import LoadReport
from chitu.protocol.account import PrefillTimes, RequestSnapshot, StageTimes, attempt_stages
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.tools.explain import CODES, Explanation, explain, explain_cluster

SPAN_S = st.floats(0, 100)
rooms = itertools.count()


def request(
    pair: str = "P0-D0", total_s: float = 1.0, at_s: float = 1.0, lag_s: float = 0.0, **times: Any
) -> RequestSnapshot:
    """Return a finished request that took `lag_s` longer at the router than on D. `times` has fields of StageTimes, of
    PrefillTimes and of the record."""
    prefill, _, decode = pair.rpartition("-")
    of_p = {name: times.pop(name, 0.0) for name in ("queue_s", "compute_s", "transfer_s")}
    fields = {"output_tokens": 11, "kv_bytes": 1000, **{k: times.pop(k) for k in list(times) if not k.endswith("_s")}}
    report = StageTimes(PrefillTimes(**of_p), **{"total_s": total_s, **times})
    ended_s = at_s + total_s + lag_s
    stages = attempt_stages(at_s, at_s, ended_s, report, is_pair=bool(prefill))
    return RequestSnapshot(
        **{
            **dict(room=str(next(rooms)), request_id="r", prefill=prefill or None, decode=decode, state="finished"),
            **dict(prompt_tokens=100, created_at_s=at_s, first_token_at_s=at_s, ended_at_s=ended_s, error=""),
            **dict(stages=stages, **fields),
        }
    )


def snapshot(*requests: RequestSnapshot, time_s: float = 10.0, loads: dict[str, LoadReport] | None = None) -> Any:
    loads = loads if loads is not None else dict.fromkeys(("P0", "P1", "D0", "D1"), LoadReport(pages_total=10))
    roles = {"P": "prefill", "D": "decode", "U": "unified"}
    instances = tuple(InstanceSnapshot(name, roles[name[0]], "up", "h", 1, "1", load) for name, load in loads.items())
    return ClusterSnapshot("m", "1", 1024, 16, "shm", time_s, "1", 0, instances, requests)


def found(*requests: RequestSnapshot, **more: Any) -> Explanation:
    return explain([snapshot(time_s=0.0), snapshot(*requests, **more)])


def test_a_slow_pair_is_named_where_the_others_are_fast() -> None:
    pairs = [f"P{p}-D{d}" for p in (0, 1) for d in (0, 1)]
    requests = [
        request(pair, transfer_s=0.5 if pair == "P1-D0" else 0.05, first_token_s=1.0, at_s=float(n))
        for n in range(6)
        for pair in pairs
    ]
    slow = found(*requests)
    assert slow.bottleneck == "transfer_pair" and slow.says.startswith("P1 -> D0 takes 10.0 times as long")


def test_one_slow_request_makes_no_instance_slow() -> None:
    requests = [request(f"P{n % 2}-D0", compute_s=0.1, first_token_s=0.1) for n in range(8)]
    assert found(*requests, request("P1-D0", 9.0, compute_s=9.0, first_token_s=9.0)).bottleneck != "prefill_instance"


def test_requests_that_ended_before_the_watching_do_not_count() -> None:
    early = [request(at_s=-5.0, compute_s=1.0) for _ in range(5)]
    none = found(*early)
    assert (none.bottleneck, none.num_ended, none.stages) == ("no_requests", 0, ())
    assert explain([snapshot(*early)]).num_ended == 5, "a single look has nothing else"


def test_a_counter_that_starts_anew_is_not_a_fall() -> None:
    def at(time_s: float, life: str, retractions: int, *requests: RequestSnapshot) -> ClusterSnapshot:
        seen = snapshot(*requests, time_s=time_s, loads={"P0": LoadReport(pages_total=10)})
        load = LoadReport(pages_total=10, pages_free=9, retractions=retractions)
        return msgspec.structs.replace(
            seen, instances=(*seen.instances, InstanceSnapshot("D0", "decode", "up", "h", 1, life, load))
        )

    requests = [request() for _ in range(5)]
    assert explain([at(0, "1", 100), at(5, "1", 100), at(9, "1", 100, *requests)]).bottleneck == "decode"
    again = explain([at(0, "1", 100), at(5, "2", 3), at(9, "2", 4, *requests)])
    assert again.bottleneck == "pages" and again.says.startswith("4 requests were moved")


def test_unified_instances_have_no_transfer() -> None:
    requests = [request("U0", queue_s=0.7, compute_s=0.1, first_token_s=0.8) for _ in range(5)]
    alone = found(*requests, loads={"U0": LoadReport(pages_total=10, pages_free=9)})
    assert alone.bottleneck == "prefill_queue" and sum(stage.share for stage in alone.stages) == pytest.approx(1)


def test_at_a_unified_instance_decoding_may_be_what_prompts_wait_for() -> None:
    requests = [request("U0", queue_s=0.7, compute_s=0.1, first_token_s=0.8) for _ in range(5)]

    def at(time_s: float, backlog_s: float, decode_backlog_s: float, *ended: RequestSnapshot) -> ClusterSnapshot:
        load = LoadReport(
            pages_total=10, pages_free=9, running=4, tokens=999, backlog_s=backlog_s, decode_backlog_s=decode_backlog_s
        )
        return snapshot(*ended, time_s=time_s, loads={"U0": load})  # type: ignore[no-any-return]

    assert explain([at(0, 50, 1), at(9, 51, 8, *requests)]).bottleneck == "running_requests"
    prompts = explain([at(0, 1, 50), at(9, 8, 51, *requests)])
    assert prompts.bottleneck == "prefill_queue" and "500 computed" in prompts.says, "not the tokens that it has sent"


def test_choices_of_one_prompt_are_no_prompts_at_once() -> None:
    def choices(number: int) -> list[RequestSnapshot]:
        times = {"compute_s": 1.0, "first_token_s": 1.0}
        return [
            request(total_s=1.2, at_s=at_s, prompt_room=f"prompt at {at_s}", **times)
            for at_s in (1.0, 3.0, 5.0)
            for _ in range(number)
        ]

    assert found(*choices(1)).bottleneck == found(*choices(4)).bottleneck == "prefill_compute"


@given(
    st.lists(
        st.tuples(*[SPAN_S] * 9, st.integers(0, 5), st.sampled_from(["P0-D0", "P1-D0", "P0-D1", "U0"])), max_size=8
    )
)
def test_stages_add_up_and_there_is_always_a_word(spans: list[tuple[Any, ...]]) -> None:
    requests = []
    for *times, tokens, pair in spans:
        total_s, lag_s, queue_s, compute_s, transfer_s, admission_s, first_s, landed_s, at_s = times
        requests.append(
            request(
                *(pair, total_s, at_s, lag_s),
                **dict(queue_s=queue_s, compute_s=compute_s, transfer_s=transfer_s, admission_s=admission_s),
                **dict(first_token_s=first_s, kv_landed_s=landed_s, output_tokens=tokens),
            )
        )
    made = found(*requests)
    assert made.bottleneck in CODES and made.says and made.advice
    assert all(stage.mean_s >= 0 for stage in made.stages)
    if any(stage.mean_s for stage in made.stages):
        assert sum(stage.share for stage in made.stages) == pytest.approx(1)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Explanation) == made


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "neither a file nor a URL"), (b"", "is empty"), (b"{}\n", "is no file of"), (b"\xff", "is no file of")],
)
def test_what_is_no_file_of_snapshots_is_one_sentence(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "seen"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        explain_cluster(str(path))
