"""Who may abort a request: only its tenant, by the id of the request or of the answer."""

from __future__ import annotations

from chitu.http.choice import RunningAnswer, RunningAnswers
from chitu.http.sse import ChatFormat


def test_a_request_is_aborted_once_and_by_its_tenant_alone() -> None:
    running = RunningAnswers(lambda generation: None)
    answer = RunningAnswer("own", 0.0)
    running.add("r1", answer)
    answer_id = str(ChatFormat("r1", 0, "m", False)._head["id"])
    assert [running.abort(name, who) for name, who in (("r1", "other"), ("r2", "own"))] == [0, 0]
    assert not answer.is_aborted
    assert [running.abort(name, "own") for name in (answer_id, "r1")] == [1, 0]
    assert answer.is_aborted
    running.remove("r1", answer)
    assert (running.abort("r1", "own"), len(running)) == (0, 0)
