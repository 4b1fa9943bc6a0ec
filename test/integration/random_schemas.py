"""JSON schemas by seed: every kind of value nested in each other, all of it bounded, so that an answer ends."""

from __future__ import annotations

import random
from typing import Any


def random_schema(seed: int) -> dict[str, Any]:
    """Return an object schema that constrains every part of the object."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        schema["$defs"] = {"shared": _scalar(rng)}
        schema["properties"]["of_defs"] = {"$ref": "#/$defs/shared"}
        schema["required"].append("of_defs")
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b_c", "ü", "with space", 'quo"te', "n1"], rng.randrange(1, 4))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(8) if depth > 0 else rng.randrange(5)
    if kind == 5:
        return _object(rng, depth)
    if kind == 6:
        fewest = rng.randrange(3)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": fewest, "maxItems": fewest + 2}
    if kind == 7:
        return {"anyOf": [{"type": "boolean"}, _object(rng, depth)]}
    return _scalar(rng)


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + 7.5},
            {"type": "string", "minLength": 1, "maxLength": rng.randrange(1, 6)},
            {"type": "string", "pattern": "^[a-c]{2,4}[0-9]$"},
            {"type": "string", "format": "date"},
            {"enum": ["red", "grün", 3, None, [1, 2]]},
            {"const": {"k": [True, 1.5]}},
            {"type": ["boolean", "null"]},
        ]
    )
