"""Prompts of a field as texts or token ids, decoded in place. Pure; part of `BodyWork`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import MAX_PROMPTS
from chitu.http.ask.decoder import cut_character

_SHAPE = "must be a string, a list of strings, a list of token ids, or a list of those (none of them empty)"
_BRACKET = ord("[")
_TEXTS = re.compile(rb'\[\s*"')
_LISTS = re.compile(rb"\[\s*\[")
_Several = msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
_Ids = Annotated[list[int], msgspec.Meta(min_length=1)]
_one_text = msgspec.json.Decoder(str)
_texts: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(Annotated[list[str], _Several])
_ids: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(_Ids)
_ids_of_several: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(Annotated[list[_Ids], _Several])


def prompts_of(raw: msgspec.Raw, param: str) -> list[str] | list[list[int]]:
    """Return the prompts of a field, all texts or all token ids. Raise InvalidRequest for any other shape. Decodes in
    place, because no other request has a turn while a large body is copied."""
    given = memoryview(raw)
    if not given or bytes(given[:5]) == b"null":
        raise InvalidRequest(f"{param} is required", param)
    try:
        if given[0] != _BRACKET:
            return [_one_text.decode(given)]
        if _TEXTS.match(given):
            return _texts.decode(given)
        if not _LISTS.match(given):
            return [_ids.decode(given)]
        # Count before decoding: a decoded list costs many times the three bytes of its JSON.
        if bytes(given).count(b"[") <= MAX_PROMPTS + 1:
            return _ids_of_several.decode(given)
    except msgspec.ValidationError as error:
        if "length <=" not in str(error):
            raise InvalidRequest(f"{param} {_SHAPE}", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        broken = InvalidRequest(f"{param} is not valid JSON: {error}", param)
        raise cut_character(bytes(given), param) or broken from error
    raise InvalidRequest(f"{param}: at most {MAX_PROMPTS} prompts are accepted", param)
