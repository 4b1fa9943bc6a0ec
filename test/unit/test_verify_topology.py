"""What verify_xpyd_topology demands, on made-up clusters: it reports each thing that can be wrong, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.protocol import KVLayout
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.tools.verify.probe import CheckedRequest, MovedSums, Prober, Served, read_answer
from chitu.tools.verify.topology import expected_bytes, judge

LAYOUT = KVLayout("hash", 4, 2, 16, 16, "bfloat16", 500)


def load_script() -> ModuleType:
    path = Path(__file__).parents[1] / "verify_xpyd_topology.py"
    spec = importlib.util.spec_from_file_location("verify_xpyd_topology", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


verify = load_script()


def instance(name: str, status: str = "up", layout: KVLayout | None = LAYOUT) -> InstanceSnapshot:
    role = {"P": "prefill", "D": "decode", "U": "unified"}[name[0]]
    return InstanceSnapshot(name, role, status, "h", 1, "1", None, layout)  # type: ignore[arg-type]


def snapshot(*instances: InstanceSnapshot) -> ClusterSnapshot:
    return ClusterSnapshot("m", "1", 512, 16, "shm", 0.0, "1", 0, instances, ())


def asked(number: int, pair: str, request_id: str, prompt_tokens: int = 40, **changes: object) -> CheckedRequest:
    """Return a request that went well, over `pair`."""
    prefill, decode = pair.split("-")
    kv_bytes = expected_bytes(prompt_tokens, LAYOUT)
    served = msgspec.structs.replace(Served(prefill, decode, prompt_tokens, 3, 0, 0, kv_bytes, 0.5), **changes)
    return CheckedRequest(number, request_id, (number, 5, 6), served=served)


def all_pairs(prefills: int = 2, decodes: int = 3) -> tuple[ClusterSnapshot, list[CheckedRequest]]:
    names = [f"P{k}" for k in range(prefills)] + [f"D{m}" for m in range(decodes)]
    pairs = itertools.product(range(2), range(prefills), range(decodes))
    requests = [asked(n, f"P{k}-D{m}", f"{n}{k}{m}") for n, k, m in pairs]
    return snapshot(*map(instance, names)), requests


def reasons(
    cluster: ClusterSnapshot, requests: list[CheckedRequest], after: ClusterSnapshot | None = None
) -> list[str]:
    verdict = judge(cluster, after or cluster, requests)
    assert verdict.ok == (not verdict.reasons)
    return list(verdict.reasons)


def test_the_formula_is_that_of_whole_pages_and_a_row_of_whole_cache_lines() -> None:
    # 3 pages of 16 tokens, K and V of 4 layers, 2 heads of 16 bfloat16; 64 bytes of header, 500 float32.
    assert expected_bytes(40, LAYOUT) == 3 * (2 * 4 * 2 * 16 * 16 * 2) + 64 + 2048
    assert expected_bytes(48, LAYOUT) == expected_bytes(33, LAYOUT)
    # Four ranks, two heads: each head goes to two ranks.
    wide = msgspec.structs.replace(LAYOUT, tp_size=4)
    assert expected_bytes(40, wide) == 3 * (2 * 4 * 4 * 16 * 16 * 2) + 64 + 2048


def test_for_the_last_token_alone_no_pages_are_expected() -> None:
    cluster, requests = all_pairs()
    row = expected_bytes(0, LAYOUT)
    last = {"output_tokens": 3, "continued_tokens": 2}
    assert reasons(cluster, [*requests[:-1], asked(1, "P1-D2", "last", kv_bytes=row, **last)]) == []
    moved = asked(1, "P1-D2", "last", **last)
    assert any(f"not {row}" in reason for reason in reasons(cluster, [*requests[:-1], moved]))


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 3), (4, 2)])
def test_a_cluster_of_which_every_pair_works_passes(prefills: int, decodes: int) -> None:
    cluster, requests = all_pairs(prefills, decodes)
    verdict = judge(cluster, cluster, requests)
    assert verdict.ok and len(verdict.pairs) == prefills * decodes
    assert sum(pair.requests for pair in verdict.pairs) == len(requests)


def test_who_is_not_up_is_named_once_and_alone() -> None:
    cluster, requests = all_pairs()
    served = [one for one in requests if one.pair[1] != "D2"]
    members = cluster.instances[:-1]
    assert reasons(snapshot(*members, instance("D2", "down", None)), served) == ["D2 is down"]
    assert reasons(snapshot(*members, instance("D2", "draining")), served) == ["D2 is draining"]
    assert reasons(cluster, requests, after=snapshot(*members, instance("D2", "down", None))) == ["D2 is down"]


def test_who_got_nothing_is_named_and_so_is_a_pair_that_was_left_out() -> None:
    cluster, requests = all_pairs()
    without_d1 = [one for one in requests if one.pair[1] != "D1"]
    assert reasons(cluster, without_d1) == ["D1 got no request"]
    aslant = [one for one in requests if one.pair != ("P1", "D2")]
    assert reasons(cluster, aslant) == ["no request went over the pair P1-D2"]


def test_wrong_bytes_tokens_ids_and_errors_are_said() -> None:
    cluster, requests = all_pairs()
    more = asked(9, "P0-D1", "x1", kv_bytes=77)
    (found,) = reasons(cluster, [*requests, more])
    assert found.startswith("1 of 13 requests of 40 prompt tokens over P0-D1 moved 77 bytes, not ")
    other = CheckedRequest(0, "x2", (0, 5, 7), served=asked(0, "P1-D1", "x2").served)
    assert reasons(cluster, [*requests, other]) == ["P1-D1 gave other tokens than other pairs did to the same prompt"]
    assert reasons(cluster, [*requests, requests[0]]) == ["the request id 000 was given more than once"]
    failed = CheckedRequest(0, error="decode_lost: D1 is gone")
    assert reasons(cluster, [*requests, failed]) == ["1 of 13 requests failed: decode_lost: D1 is gone"]
    short = CheckedRequest(9, "x4", (1,), served=asked(9, "P0-D0", "x4").served)
    assert reasons(cluster, [*requests, short]) == ["1 of 13 requests got 1 tokens, but the router counted 3"]


def answered(pair: str, request_id: str, *logprobs: float, tokens: tuple[int, ...] = (0, 5, 6)) -> CheckedRequest:
    return dataclasses.replace(asked(0, pair, request_id), tokens=tokens, logprobs=logprobs)


def test_what_repeated_answers_of_a_pair_differ_by_is_rounding_and_more_between_pairs_is_not() -> None:
    cluster = snapshot(*map(instance, ("P0", "P1", "D0")))
    found = [answered("P0-D0", "a", -1.0, -2.0, -3.0), answered("P1-D0", "b", -1.0, -2.0, -3.05)]
    assert reasons(cluster, found) == [], "bfloat16"
    found += [answered("P0-D0", "c", -1.0, -2.02, -3.0), answered("P1-D0", "d", -1.0, -2.0, -3.2)]
    assert reasons(cluster, found) == [], "P1 answered well once"
    off = [answered("P0-D0", "a", -1.0, -2.0, -3.0), answered("P1-D0", "b", -1.0, -2.0, -3.2)]
    off += [answered("P1-D0", "c", -1.0, -2.0, -3.21)]
    (reason,) = reasons(cluster, off)
    assert reason == ("P0-D0 and P1-D0 differ by 0.2 in logprobs of the same tokens, where rounding explains 0.08"), (
        reason
    )


def test_another_token_is_right_if_it_was_a_near_tie() -> None:
    cluster = snapshot(*map(instance, ("P0", "P1", "D0")))
    usual = [answered("P0-D0", name, -1.0, -2.0, -3.0) for name in ("a", "b")]
    assert reasons(cluster, [*usual, answered("P1-D0", "c", -1.0, -2.05, -9.0, tokens=(0, 7, 9))]) == []
    (reason,) = reasons(cluster, [*usual, answered("P1-D0", "c", -1.0, -2.5, -9.0, tokens=(0, 7, 9))])
    assert reason == "P1-D0 gave other tokens than other pairs did to the same prompt"


def test_damage_between_p_and_d_is_said_with_its_request_though_all_tokens_are_equal() -> None:
    cluster, requests = all_pairs(1, 1)
    right = MovedSums(0, 4, "0" * 16 * 12, "0" * 16 * 12)
    wrong = msgspec.structs.replace(right, landed="0" * 16 * 4 + "1" * 16 + "0" * 16 * 7)
    sound = asked(0, "P0-D0", "s", moved=right)
    assert reasons(cluster, [*requests, sound]) == []
    (reason,) = reasons(cluster, [*requests, sound, asked(0, "P0-D0", "hurt", moved=wrong)])
    assert reason.startswith("request hurt over P0-D0: K and V differ between P and D")
    assert "page 1, layer 1, in that layer alone" in reason


def test_a_transfer_that_d_refused_is_said_whether_another_attempt_answered_or_none() -> None:
    cluster, requests = all_pairs(1, 1)
    again = asked(0, "P0-D0", "again", refused=(("P0", "D0"),))
    said = ["P0-D0: D rejected 1 transfers: the data was damaged (integrity)"]
    assert reasons(cluster, [*requests, again]) == said
    failed = CheckedRequest(0, "lost", error="integrity: a row")
    record = RequestSnapshot("room", "lost", "P0", "D0", "failed", 9, 0, 0.0, None, 1.0, 0, None, "integrity")
    after = msgspec.structs.replace(cluster, requests=(record,))
    assert reasons(cluster, [*requests, failed], after) == ["1 of 3 requests failed: integrity: a row", *said]


PROOF = (
    '"usage": {"prompt_tokens": 9, "completion_tokens": 4},'
    ' "chitu": {"choices": [{"attempts": [{"prefill": "P1", "decode": "D0", "continued_tokens": 0,'
    ' "cached_tokens": 0, "kv_bytes": 5, "first_token_s": null},'
    ' {"prefill": "P0", "decode": "D0", "continued_tokens": 1, "cached_tokens": 2, "kv_bytes": 7,'
    ' "first_token_s": 6.0}]}]}'
)


def test_an_answer_is_read_with_its_proof_and_one_cut_off_or_with_an_error_is_none() -> None:
    choices = '"choices": [{"text": "ab", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.5, -2]}}]'
    event, last = f"data: {{{choices}}}\n\n".encode(), f'data: {{"choices": [], {PROOF}}}\n\n'.encode()
    served = Served("P0", "D0", 9, 4, 1, 2, 7, 6.0)
    streamed = read_answer(3, "r", event * 2 + last + b"data: [DONE]\n\n", True)
    assert streamed == CheckedRequest(3, "r", (1, 2, 1, 2), "", served, "abab", (-1.5, -2, -1.5, -2))
    assert read_answer(3, "r", f"{{{choices}, {PROOF}}}".encode(), False) == CheckedRequest(
        3, "r", (1, 2), "", served, "ab", (-1.5, -2)
    )
    with pytest.raises(ValueError, match="cut off"):
        read_answer(0, "r", event + last, True)
    with pytest.raises(ValueError, match="decode_lost: gone"):
        failed = b'data: {"error":{"code":"decode_lost","message":"gone"}}\n\ndata: [DONE]\n\n'
        read_answer(0, "r", event + failed, True)
    with pytest.raises(ValueError, match="return_proof"):
        read_answer(0, "r", event + b"data: [DONE]\n\n", True)


def test_a_router_that_is_gone_is_an_error_of_ours_also_where_no_answer_is_checked() -> None:
    """`chitu verify` exits with 2 for these; 1 would say that an answer is wrong."""
    prober = Prober(RouterClient("http://127.0.0.1:1"), "m", max_tokens=1, timeout_s=1.0)
    with pytest.raises(RouterUnreachable):
        prober.token_ids("a")
    assert prober.ask(0, "a", False).error.startswith("router_unreachable: no router listens")


def test_any_python_runs_it_or_says_which_one_does(tmp_path: Path) -> None:
    """-S hides the libraries, as in a Python that is not the project's."""
    script = tmp_path / "test" / "verify_xpyd_topology.py"
    script.parent.mkdir()
    script.write_text(Path(verify.__file__ or "").read_text())
    command = [sys.executable, "-I", "-S", str(script), "--stream"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "script/setup.sh" in done.stderr
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho "taken over: $*"\n')
    own.chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"taken over: {script} --stream\n"


def test_its_hints_name_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main(["--router", "http://127.0.0.1:1"]) == 1
    assert "name another with --router" in capsys.readouterr().out
