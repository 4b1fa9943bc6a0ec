"""Arguments that are tagged texts: the rules of them, in llguidance's Lark, that follow the schema of a tool. Pure.

An object's schema is brought into forms, of which the arguments have one: each form has named arguments in their order,
some of them required, and perhaps others behind them. As with the engine's own objects, a name that is not listed may
come twice.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from chitu.errors import InvalidRequest
from chitu.grammars.marks import behind_tokens, quoted, token_in, with_marks
from chitu.grammars.patterns import searched, terminal
from chitu.grammars.raw_text import RawText, Text, Trail, is_raw_text, texts_of, types_of
from chitu.grammars.schema import ONE_OF, enforceable, standalone, target_of
from chitu.protocol import ToolFields

MAX_FORMS = 64
"""Forms that the arguments of one tool may have."""
_NEVER = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "propertyNames"),
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords that are not enforced, of those that constrain objects."""
_OF_ALL = ("allOf", "anyOf", "oneOf")
_NAME = "[A-Za-z0-9_.-]+"
_WIDE_NAME = r"""[^\s<>"'=()\[\]{},]+"""
"""Names in tags: without the characters that end a name in some format."""


class _Shape(NamedTuple):
    """A schema of an object: what it says of its own."""

    path: str
    properties: Mapping[str, Any]
    patterns: Mapping[str, Any]
    others: Any
    """Schema of what is neither; None: not said, so anything."""

    def of(self, name: str) -> list[tuple[Any, str]]:
        """Return the schemas that an argument follows, each with its place."""
        found = []
        if name in self.properties:
            found.append((self.properties[name], f"{self.path}.properties.{name}"))
        found += [
            (schema, f"{self.path}.patternProperties.{pattern}")
            for pattern, schema in self.patterns.items()
            if re.search(pattern, name)
        ]
        if not found and self.others is not None:
            found.append((self.others, f"{self.path}.additionalProperties"))
        return found


class _Form(NamedTuple):
    shapes: tuple[_Shape, ...] = ()
    """All of them apply."""
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    """Bounds of the number of arguments."""

    def both(self, other: _Form) -> _Form:
        most = min((m for m in (self.most, other.most) if m is not None), default=None)
        required = tuple(dict.fromkeys((*self.required, *other.required)))
        return _Form((*self.shapes, *other.shapes), required, max(self.least, other.least), most)

    def names(self) -> list[str]:
        listed = (name for shape in self.shapes for name in shape.properties)
        return [*dict.fromkeys((*listed, *self.required))]

    def of(self, name: str) -> list[tuple[Any, str]]:
        return [found for shape in self.shapes for found in shape.of(name)]


def _forms(schema: Any, root: Any, path: str = "", trail: Trail | None = None) -> list[_Form]:
    """Return the forms of an object that a schema allows; empty: none."""
    trail = trail or Trail()
    if not isinstance(schema, Mapping):
        return [] if schema is False else [_Form()]
    for key in _NEVER:
        if key in schema:
            raise InvalidRequest(f"{key} cannot be enforced of arguments", f"{path}.{key}")
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        return []
    patterns = schema.get("patternProperties") or {}
    for pattern in patterns:
        try:
            re.compile(pattern)
            searched(pattern)
        except (ValueError, re.error) as error:
            raise InvalidRequest(f"patternProperties: {error}", f"{path}.patternProperties") from None
    own = _Shape(path, schema.get("properties") or {}, patterns, schema.get("additionalProperties"))
    is_shape = own.properties or patterns or own.others is not None
    required = tuple(schema.get("required") or ())
    bounds = schema.get("minProperties", 0), schema.get("maxProperties")
    found = [_Form((own,) if is_shape else (), required, *bounds)]
    for key in ("const", "enum"):
        if key in schema:
            values = [schema["const"]] if key == "const" else schema["enum"]
            found = _of_both(
                found, [_form_of_value(each, f"{path}.{key}") for each in values if isinstance(each, dict)], path
            )
    if (reference := schema.get("$ref")) is not None:
        target, place, behind = trail.follow(reference, root, path)
        found = _of_both(found, _forms(target, root, place, behind), path)
    for i, each in enumerate(schema.get("allOf") or ()):
        found = _of_both(found, _forms(each, root, f"{path}.allOf[{i}]", trail), path)
    for key in ("anyOf", "oneOf"):
        if key not in schema:
            continue
        each_of = [_forms(each, root, f"{path}.{key}[{i}]", trail) for i, each in enumerate(schema[key])]
        if key == "oneOf" and sum(map(bool, each_of)) > 1:
            raise InvalidRequest(ONE_OF, f"{path}.oneOf")
        found = _of_both(found, [form for forms in each_of for form in forms], path)
    return found


def _form_of_value(value: dict[str, Any], path: str) -> _Form:
    properties = {name: {"const": each} for name, each in value.items()}
    return _Form((_Shape(path, properties, {}, False),), tuple(value))


def _of_both(left: Sequence[_Form], right: Sequence[_Form], path: str) -> list[_Form]:
    if len(left) * len(right) > MAX_FORMS:
        raise InvalidRequest(f"more than {MAX_FORMS} forms of arguments", path)
    return [one.both(other) for one, other in itertools.product(left, right)]


def argument_schema(name: str, parameters: Any) -> dict[str, Any]:
    """Return the schema by which a tagged value is told to be a string or JSON, from parameters of any kind: all that
    they say of this argument."""
    return {"anyOf": list(_said_of(name, parameters, parameters, set()))}


def _said_of(name: str, schema: Any, root: Any, seen: set[int]) -> Iterator[Any]:
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    properties, patterns, others = (schema.get(f"{key}roperties") for key in ("p", "patternP", "additionalP"))
    is_listed = False
    if isinstance(properties, Mapping) and name in properties:
        is_listed = True
        yield properties[name]
    for pattern, each in patterns.items() if isinstance(patterns, Mapping) else ():
        if _is_found(pattern, name):
            is_listed = True
            yield each
    if not is_listed and isinstance(others, Mapping):
        yield others
    for value in (schema.get("const"), *_list(schema.get("enum"))):
        if isinstance(value, Mapping) and name in value:
            yield {"const": value[name]}
    for each in (target_of(schema.get("$ref"), root), *(each for key in _OF_ALL for each in _list(schema.get(key)))):
        yield from _said_of(name, each, root, seen)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


class FieldRules:
    """Rules of one tool's calls. `begin` and `end`: parts of a rule, ahead of the arguments and behind them."""

    def __init__(
        self,
        rule: str,
        schema: Any,
        fields: ToolFields,
        json_options: Mapping[str, Any],
        added_tokens: Mapping[str, int],
    ) -> None:
        self._rule, self._root, self._fields, self._options = rule, enforceable(schema), fields, json_options
        self._added = added_tokens
        self._rules: list[str] = []
        self._texts = RawText(rule, fields.begin, fields.end, added_tokens) if not fields.separator else None
        self._values: dict[str, str | None] = {}
        """Rule of each argument, by name and schemas; None: no value is allowed."""

    @property
    def places(self) -> list[tuple[str, str]]:
        """Terminals, each with the place of its schema."""
        return self._texts.places if self._texts is not None else []

    def lark(self, begin: str, end: str) -> list[str]:
        """Return the rules. Raise InvalidRequest, with the place, for what cannot be enforced."""
        forms = _forms(self._root, self._root)
        raw = {
            name: is_raw_text(argument_schema(name, self._root), self._root) for form in forms for name in form.names()
        }
        made: list[str] = []
        first: _Impossible | None = None
        for form in forms:
            try:
                made += self._form(len(made), form, raw)
            except _Impossible as error:
                first = first or error
        if not made:
            why = first or _Impossible("no arguments are allowed", "")
            raise InvalidRequest(why.problem, why.path)
        several = made[0] if len(made) == 1 else f"({' | '.join(each or chr(34) * 2 for each in made)})"
        texts = self._texts.rules if self._texts is not None else []
        return [*self._rules, *texts, f"{self._rule}: {' '.join(filter(None, (begin, several, end)))}"]

    def _form(self, number: int, form: _Form, raw: Mapping[str, bool]) -> list[str]:
        """Return the arguments of a form, as parts of a rule; several if one of some optional ones has to be there."""
        parts: list[tuple[str, bool]] = []
        for name in form.names():
            value, is_required = self._value(name, form.of(name), raw[name]), name in form.required
            if value is not None:
                parts.append((value, is_required))
            elif is_required:
                path = next((path for _, path in form.of(name)), "")
                raise _Impossible(f"no value of {name[:80]!r} is allowed", path)
        others = self._others(form)
        num_required, optional = len(form.required), [i for i, part in enumerate(parts) if not part[1]]
        least, most = max(0, form.least - num_required), form.most
        if most is not None and (most < num_required or (others and optional) or (not others and most < len(parts))):
            if not (others or optional) or most < num_required:
                raise _Impossible(f"maxProperties of {most} allows no arguments", ".maxProperties")
            raise InvalidRequest("maxProperties cannot be enforced beside optional properties", ".maxProperties")
        if least > 1 and optional:
            raise InvalidRequest("minProperties cannot be enforced beside optional properties", ".minProperties")
        if least and not optional and not others:
            raise _Impossible(f"minProperties of {form.least} allows no arguments", ".minProperties")
        bounds = (least if not optional else 0, None if most is None else most - num_required)
        if not (least and optional):
            return [self._sequence(f"{number}", parts, others, bounds)]
        made = []
        for i in optional:  # the first of the optional ones that is there
            left = [(value, needed or j == i) for j, (value, needed) in enumerate(parts) if needed or j >= i]
            made.append(self._sequence(f"{number}_{i}", left, others, bounds))
        if others:
            made.append(self._sequence(f"{number}_others", [part for part in parts if part[1]], others, (1, None)))
        return made

    def _sequence(
        self, number: str, parts: Sequence[tuple[str, bool]], others: str, bounds: tuple[int, int | None]
    ) -> str:
        """Return arguments in their order, with what separates them."""
        least, most = bounds
        count = f"{{{least},{'' if most is None else most}}}"
        if not self._fields.separator:
            made = [value if needed else f"{value}?" for value, needed in parts]
            return " ".join([*made, f"{others}{count}"] if others and most != 0 else made)
        separator, rule = quoted(self._fields.separator), f"{self._rule}_{number}"
        last = len(parts)
        first_last, more_last = '""', '""'
        if others and most != 0:
            more_last = f"({separator} {others}){count}"
            rest = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
            first_last = f"{others} ({separator} {others}){rest}" + ("" if least else ' | ""')
        self._rules += [f"{rule}_first_{last}: {first_last}", f"{rule}_more_{last}: {more_last}"]
        for i, (value, needed) in enumerate(parts):
            behind = f"{rule}_more_{i + 1}"
            self._rules.append(f"{rule}_first_{i}: {value} {behind}" + ("" if needed else f" | {rule}_first_{i + 1}"))
            self._rules.append(f"{rule}_more_{i}: ({separator} {value}){'' if needed else '?'} {behind}")
        return f"{rule}_first_0"

    def _value(self, name: str, schemas: Sequence[tuple[Any, str]], is_raw: bool) -> str | None:
        def head(middle: str) -> str:
            return with_marks(self._fields.begin + name + middle, self._added)

        return self._argument(head, schemas, is_raw, f"{name}\n")

    def _argument(
        self, head: Callable[[str], str], schemas: Sequence[tuple[Any, str]], is_raw: bool, label: str
    ) -> str | None:
        """Return the rule of an argument; None if it can have no value. `head` returns what precedes the value, with a
        `middle`."""
        if any(schema is False for schema, _ in schemas):
            return None
        key, fields = label + json.dumps([schema for schema, _ in schemas]), self._fields
        if key not in self._values:
            if is_raw and self._texts is not None:
                bodies = self._raw(head, schemas)
            else:
                bodies = [f"{head(fields.json_middle or fields.middle)} {self._json(schemas)}"]
            name = f"{self._rule}_{len(self._values)}" if bodies else None
            self._values[key] = name
            if name is not None:
                self._rules.append(f"{name}: {' | '.join(bodies)}")
        return self._values[key]

    def _raw(self, head: Callable[[str], str], schemas: Sequence[tuple[Any, str]]) -> list[str]:
        """Return what a text may be, with its head, as parts of a rule; none if it can be nothing."""
        assert self._texts is not None
        found: list[Text] = [Text(), Text(is_null=True)]
        for schema, path in schemas:
            each = texts_of(schema, self._root, path)
            found = [both for one in found for other in each if (both := one.both(other)) is not None]
        if not any("null" in types_of(schema, self._root) for schema, _ in schemas):
            found = [text for text in found if not text.is_null]  # the text `null` is a string
        nulls, texts = [], dict.fromkeys(found)
        if self._fields.json_middle and any(text.is_null for text in texts):  # the head tells it from a text
            nulls = [f"{head(self._fields.json_middle)} {quoted('null')} {with_marks(self._fields.end, self._added)}"]
            texts = dict.fromkeys(text for text in texts if not text.is_null)
        path = schemas[0][1] if schemas else ""
        parts = [self._texts.free()] if Text() in texts else [self._texts.rule_of(text, path) for text in texts]
        return [f"{head(self._fields.middle)} ({' | '.join(parts)})", *nulls] if parts else nulls

    def _json(self, schemas: Sequence[tuple[Any, str]]) -> str:
        each = [schema for schema, _ in schemas if schema is not True]
        own = each[0] if len(each) == 1 else {"allOf": each} if each else {}
        told = json.dumps({**standalone(own, self._root), "x-guidance": dict(self._options)})
        return f"%json {told} {with_marks(self._fields.end, self._added)}"

    def _others(self, form: _Form) -> str:
        """Return the rule of an argument that is not listed; empty: there is none."""
        listed = form.names()
        says = any(shape.patterns or shape.others not in (None, False) for shape in form.shapes)
        if any(shape.others is False and not shape.patterns for shape in form.shapes) or (listed and not says):
            return ""
        with_patterns = [shape for shape in form.shapes if shape.patterns]
        if len(with_patterns) > 1:
            raise InvalidRequest(
                "patternProperties cannot be enforced twice", f"{with_patterns[1].path}.patternProperties"
            )
        rest = [
            (shape.others, f"{shape.path}.additionalProperties") for shape in form.shapes if shape.others is not None
        ]
        name_of_any = terminal(_NAME if self._fields.separator else _WIDE_NAME)
        but = f" & ~({' | '.join(map(quoted, listed))})" if listed else ""
        kinds: list[tuple[str, list[tuple[Any, str]]]] = []
        for shape in with_patterns:
            rest = [each for each in rest if each[1] != f"{shape.path}.additionalProperties"]
            regexes = {pattern: terminal(searched(pattern)) for pattern in shape.patterns}
            for pattern, schema in shape.patterns.items():
                others = "".join(f" & ~{regex}" for each, regex in regexes.items() if each != pattern)
                place = f"{shape.path}.patternProperties.{pattern}"
                kinds.append((f"{name_of_any} & {regexes[pattern]}{others}", [(schema, place), *rest]))
            if shape.others is not False:
                none = "".join(f" & ~{regex}" for regex in regexes.values())
                own = [(shape.others, f"{shape.path}.additionalProperties")] if shape.others is not None else []
                kinds.append((f"{name_of_any}{none}", [*own, *rest]))
        if not with_patterns:
            kinds.append((name_of_any, rest))
        made = []
        for name, schemas in kinds:
            is_raw = all(is_raw_text(schema, self._root) for schema, _ in schemas)
            value = self._argument(partial(self._head_of, f"({name}{but})"), schemas, is_raw, f"{name}\n{but}")
            if value is not None:
                made.append(value)
        return f"({' | '.join(made)})" if made else ""

    def _head_of(self, name: str, middle: str) -> str:
        """Return what precedes the value of an argument whose name is a terminal. All of it is one terminal, as the
        engine would not see where a listed name is another one."""
        ahead, begin = behind_tokens(self._fields.begin, self._added)
        end, behind = token_in(middle, self._added)
        rule = f"{self._rule}_head_{len(self._rules)}".upper()
        self._rules.append(f"{rule}: {quoted(begin)} {name} {quoted(end)}")
        return f"{ahead} {rule} {behind}"


class _Impossible(Exception):
    """A form of arguments that no call can have; another one may be possible."""

    def __init__(self, problem: str, path: str) -> None:
        super().__init__(problem)
        self.problem, self.path = problem, path
