"""Fields that constrain an answer: the grammar of each, at most one of them, and errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from scheduler_world import Instance, prompt_of, room_of
from support.requests import unified_request
from test_jobs import World, copy_of_tiny

from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.errors import Capacity, ChituError, InvalidRequest
from chitu.fake.executor import FakeExecutor
from chitu.grammars import CompiledGrammar, GrammarStore
from chitu.grammars.store import Outcome
from chitu.http.ask.bodies import MAX_CHOICE_CHARS, MAX_CHOICES, CompletionBody
from chitu.http.ask.grammar_fields import grammar_of
from chitu.http.table import BODIES
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    MAX_GRAMMAR_CHARS,
    CancelRequest,
    Fork,
    Grammar,
    Reasoning,
    SamplingParams,
    ToolCalls,
    pack_i32,
)

SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer"}}}
OF_SCHEMA = ("json_schema", SCHEMA)


def said(**fields: Any) -> tuple[Grammar, str] | None:
    return grammar_of(BODIES.decoder(CompletionBody).decode(json.dumps({"prompt": "a", **fields}).encode()))


def format_of(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        (
            format_of(name="n", strict=True, description="d", schema=SCHEMA),
            *OF_SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        *(
            ({"response_format": {"type": kind, **given}}, *OF_SCHEMA, param)
            for kind in ("json_object", "json_schema")
            for given, param in (
                ({"schema": SCHEMA, "json_schema": None}, "response_format.schema"),
                ({"json_schema": {"schema": SCHEMA}, "schema": None}, "response_format.json_schema.schema"),
            )
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {}}, "json_object", "", "response_format"),
        ({"guided_json": SCHEMA}, *OF_SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, *OF_SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "lark", "start: /a/", "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, *OF_SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, "lark", "g", "structured_outputs.grammar"),
    ],
)
def test_each_field_is_its_grammar(fields: dict[str, Any], kind: str, text: Any, param: str) -> None:
    found = said(**fields)
    assert found is not None
    grammar, its_param = found
    assert (grammar.kind, its_param) == (kind, param)
    assert (json.loads(grammar.text) if isinstance(text, (dict, list)) else grammar.text) == text


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None, "structured_outputs": None}]
)
def test_without_them_the_answer_is_free(fields: dict[str, Any]) -> None:
    assert said(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (format_of(name="n"), "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}},
            "response_format.json_schema",
        ),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
        ({"guided_json": {"enum": ["a" * MAX_GRAMMAR_CHARS]}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice"),
        ({"guided_choice": ["a" * (MAX_CHOICE_CHARS + 1)]}, "guided_choice[0]"),
        ({"guided_choice": ["a" * MAX_CHOICE_CHARS] * 65}, "guided_choice"),
        ({"structured_outputs": {"whitespace_pattern": "x", "json": {}}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_what_cannot_be_served_is_an_error_with_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        said(**fields)
    assert raised.value.param == param


def test_a_grammar_travels_with_the_sampling_and_one_that_cannot_be_compiled_is_refused_before_anything_is_sent() -> (
    None
):
    world = World()
    for job in (world.completion(["a", "b"], guided_regex="a+"), world.chat("a", guided_regex="a+")):
        assert {sampling.grammar for sampling in job.samplings} == {Grammar("regex", "a+")}
    assert world.completion("a").samplings[0].grammar is None
    with pytest.raises(InvalidRequest, match="uniqueItems") as raised:
        world.chat("a", response_format={"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}})
    assert raised.value.param == "response_format.json_schema.schema"


TEMPLATE = """{#- <tool_call> "arguments" </think> -#}{% if tools %}{% endif %}{{ messages[-1].content }}
{%- if enable_thinking is defined and not enable_thinking and not quietly %}<think>

</think>

{% endif %}"""
AHEAD, WITHIN = Reasoning("<think>", "</think>"), Reasoning("<think>", "</think>", True)
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {}}}}


def test_a_grammar_holds_behind_the_reasoning_unless_there_is_none_to_come(tmp_path: Path) -> None:
    (copy_of_tiny(tmp_path) / "chat_template.jinja").write_text(TEMPLATE)
    world = World(path=tmp_path)
    for grammar in ({"guided_regex": "a+"}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}):
        for text, fields, reasoning in (
            ("a", {}, AHEAD),
            ("a<think>\n", {}, WITHIN),
            ("a<think>b</think>\n\n", {}, None),
            ("a", {"chat_template_kwargs": {"enable_thinking": True}}, AHEAD),
            ("a", {"reasoning_effort": "none"}, None),
            ("a", {"chat_template_kwargs": {"enable_thinking": False, "quietly": True}}, None),
            ("a<think>", {"separate_reasoning": False}, None),
            ("a", {"include_reasoning": False}, AHEAD),
        ):
            job = world.chat(text, **grammar, **fields)
            given = job.samplings[0].grammar
            assert given is not None and given.reasoning == reasoning, (grammar, text, fields)
            # The parser of the text agrees with the grammar.
            assert (job.plan is not None and job.plan.reasoning is not None) is (reasoning is not None), (text, fields)
    assert World().chat("a", guided_regex="a+").samplings[0].grammar == Grammar("regex", "a+")
    assert world.completion("a<think>", guided_regex="a+").samplings[0].grammar == Grammar("regex", "a+")


def test_a_strict_tool_is_obeyed_or_refused_by_its_name(tmp_path: Path) -> None:
    (copy_of_tiny(tmp_path) / "chat_template.jinja").write_text(TEMPLATE)
    world = World(path=tmp_path)
    loose = {"type": "function", "function": {**TOOL["function"], "strict": False}}
    assert world.chat("a", tools=[loose]).samplings[0].grammar is None
    assert world.chat("a", tools=[TOOL], tool_choice="none").samplings[0].grammar is None
    odd = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"x": {"not": {}}}}}}
    strict = {**odd, "function": {**odd["function"], "strict": True}}
    place = "tools[1].function.parameters.properties.x"
    for fields, param, why in (
        ({"tools": [TOOL, strict]}, place, "not cannot be enforced ('g' is strict)"),
        ({"tools": [TOOL, odd], "tool_choice": "required"}, place, "(tool_choice enforces calls of 'g')"),
        ({"tools": [TOOL, odd], "tool_choice": {"type": "function", "function": {"name": "g"}}}, place, "of 'g')"),
        ({"tools": [TOOL], "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both define"),
        ({"tools": [TOOL], "guided_regex": "("}, "guided_regex", "an answer without calls follows it"),
        (
            {"tools": [TOOL, {**strict, "function": {**strict["function"], "parameters": {"type": "array"}}}]},
            None,
            "'g'",
        ),
    ):
        with pytest.raises(InvalidRequest) as raised:
            world.chat("a", **fields)
        assert raised.value.param == (param or "tools[1].function.parameters.type")
        assert why in raised.value.message and raised.value.message.startswith(raised.value.param)
    assert world.chat("a", tools=[TOOL, odd]).samplings[0].grammar is not None  # no call of it is enforced
    of_responses = {"type": "function", **strict["function"]}
    with pytest.raises(InvalidRequest) as raised:
        world.parsed("responses", json.dumps({"input": "a", "tools": [of_responses]}).encode())
    assert raised.value.param == "tools[0].parameters.properties.x"


def test_a_schema_of_responses_is_never_dropped() -> None:
    def asked(**format_: Any) -> Any:
        body = {"input": "a", "text": {"format": format_}, "max_output_tokens": 1}
        return World().parsed("responses", json.dumps(body).encode()).samplings[0].grammar

    for kind in ("json_schema", "json_object"):
        assert json.loads(asked(type=kind, name="n", schema=SCHEMA).text) == SCHEMA
    assert asked(type="json_object").kind == "json_object" and asked(type="text") is None
    for wrong in ({"type": "text", "schema": SCHEMA}, {"type": "json_schema"}):
        with pytest.raises(InvalidRequest) as raised:
            asked(**wrong)
        assert raised.value.param == "text.format.schema"


def test_no_more_than_one_call_is_made_where_the_template_could_not_take_them_back(tmp_path: Path) -> None:
    path = copy_of_tiny(tmp_path) / "chat_template.jinja"
    refuses = "{% for m in messages if m.tool_calls and m.tool_calls[1:] %}{{ raise_exception('one') }}{% endfor %}"
    earlier = "{% for m in messages[:-1] %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    for ahead, several in (("", True), (refuses, False)):
        path.write_text(ahead + earlier + TEMPLATE)
        job = World(path=tmp_path).chat("a", tools=[TOOL], tool_choice="required")
        grammar = job.samplings[0].grammar
        assert job.plan is not None and job.plan.is_parallel is several and grammar is not None
        assert msgspec.json.decode(grammar.text, type=ToolCalls).is_parallel is several


# ----------------------------------------------------------------------------------------------------------------------
# Requests whose grammar is compiled in a thread: they hold nothing meanwhile, and start or end when it is done.


GRAMMAR = Grammar("regex", "a+")


class Store:
    """A store that compiles when the test asks."""

    def __init__(self) -> None:
        self.futures: dict[Grammar, Future[Outcome]] = {}
        self.outcomes: dict[Grammar, Outcome] = {}
        self.refusal: ChituError | None = None

    def find(self, grammar: Grammar) -> Outcome | None:
        return self.outcomes.get(grammar)

    def submit(self, grammar: Grammar) -> Future[Outcome]:
        if self.refusal is not None:
            raise self.refusal
        return self.futures.setdefault(grammar, Future())

    def finish(self, grammar: Grammar, outcome: Outcome | None = None) -> None:
        self.outcomes[grammar] = outcome or cast(CompiledGrammar, CompiledGrammar.__new__(CompiledGrammar))
        self.futures.pop(grammar).set_result(self.outcomes[grammar])


def instance_with(store: Store) -> Instance:
    return Instance(16, grammars=cast(GrammarStore, store))


def ask(instance: Instance, index: int, grammar: Grammar | None = GRAMMAR) -> None:
    sampling = SamplingParams(4, temperature=0.0, grammar=grammar, ignore_eos=True)
    prompt = pack_i32(prompt_of(index, 6))
    instance.scheduler.submit(unified_request(room_of(index), f"r{index}", prompt, sampling))


def test_it_waits_for_its_grammar_and_others_do_not() -> None:
    store = Store()
    instance = instance_with(store)
    ask(instance, 1)
    ask(instance, 2, None)
    for _ in range(20):
        instance.scheduler.step()
    assert room_of(2) in instance.finishes and room_of(1) not in instance.tokens
    assert not instance.scheduler.is_idle, "an instance that drains waits for it"
    ask(instance, 1)  # the same request again
    store.finish(GRAMMAR)
    ask(instance, 3)
    instance.run()
    assert {instance.finishes[room_of(index)].reason for index in (1, 2, 3)} == {"length"}
    assert [len(instance.tokens[room_of(index)]) for index in (1, 2, 3)] == [4, 4, 4]
    instance.check_empty()


def test_one_that_cannot_be_compiled_or_has_to_wait_too_long_ends_with_its_error() -> None:
    store = Store()
    instance = instance_with(store)
    ask(instance, 1)
    instance.scheduler.step()
    store.finish(GRAMMAR, InvalidRequest("regex: no"))
    instance.run()
    assert (instance.finishes[room_of(1)].code, instance.finishes[room_of(1)].message) == (
        "invalid_request",
        "regex: no",
    )
    store.refusal = Capacity("256 grammars wait to be compiled already")
    ask(instance, 2, Grammar("regex", "b"))
    instance.run()
    assert instance.finishes[room_of(2)].code == "capacity"
    without = Instance(16)
    ask(without, 3)
    without.run()
    assert without.finishes[room_of(3)].code == "invalid_request"
    for each in (instance, without):
        assert not each.tokens
        each.check_empty()


def test_one_that_is_cancelled_or_whose_router_is_gone_meanwhile_does_not_come() -> None:
    ways: list[Callable[[PDScheduler], None]] = [
        lambda scheduler: scheduler.submit(CancelRequest(room_of(1))),
        lambda scheduler: scheduler.cancel_all(),
    ]
    for way in ways:
        store = Store()
        instance = instance_with(store)
        ask(instance, 1)
        instance.scheduler.step()
        way(instance.scheduler)
        instance.scheduler.step()
        store.finish(GRAMMAR)
        instance.run()
        assert not instance.tokens and not instance.finishes
        instance.check_empty()


def test_a_fork_that_is_cancelled_meanwhile_does_not_come_and_the_others_do() -> None:
    store = Store()
    instance = Instance(32, grammars=cast(GrammarStore, store))
    sampling = SamplingParams(4, temperature=0.0, grammar=GRAMMAR, ignore_eos=True)
    forks = tuple(Fork(room_of(index), f"r{index}", index) for index in (1, 2, 3))
    instance.scheduler.submit(unified_request(room_of(9), "prompt", pack_i32(prompt_of(1, 6)), sampling, forks=forks))
    instance.scheduler.step()
    instance.scheduler.submit(CancelRequest(room_of(2)))
    instance.scheduler.step()
    store.finish(GRAMMAR)
    instance.run()
    assert set(instance.tokens) == set(instance.finishes) == {room_of(1), room_of(3)}
    instance.scheduler.submit(
        unified_request(room_of(19), "prompt", pack_i32(prompt_of(2, 6)), sampling, forks=(Fork(room_of(11), "r", 1),))
    )
    instance.run()
    assert room_of(11) in instance.finishes
    instance.check_empty()


class FailingExecutor(FakeExecutor):
    """An executor in which the first slot that samples cannot follow its grammar any further."""

    slot = -1

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        result = super().execute(plan, on_layer)
        if result.slots and self.slot < 0:
            self.slot = result.slots[0]
            result.failures = {self.slot: "nothing follows"}
        return result


def test_a_token_that_follows_no_grammar_ends_its_request_alone() -> None:
    instance = Instance(16, executor=FailingExecutor)
    for index in (1, 2):
        ask(instance, index, None)
    instance.run()
    failed, whole = sorted(instance.finishes.values(), key=lambda finish: finish.reason)
    assert (failed.reason, failed.code, failed.message) == ("error", "invalid_request", "nothing follows")
    assert failed.room not in instance.tokens
    assert whole.reason == "length" and len(instance.tokens[whole.room]) == 4
    instance.check_empty()
