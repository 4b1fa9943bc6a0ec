"""The text that a client expects of an answer, as tokens. Pure; part of `BodyWork`."""

from __future__ import annotations

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import Prediction
from chitu.http.ask.served_model import ModelLimits, ServedModel
from chitu.protocol import pack_i32


def prediction_of(given: Prediction | None, model: ServedModel, limits: ModelLimits) -> bytes:
    """Return the tokens as packed int32; none without a prediction. Raise InvalidRequest for more than a request may
    have, without tokenising if that is certain."""
    if given is None:
        return b""
    text = given.content if isinstance(given.content, str) else "".join([part.text for part in given.content])
    most = limits.max_model_len
    if model.tokenizer.exceeds(text, most) or len(ids := model.tokenizer.encode(text, False)) > most:
        raise InvalidRequest(
            f"prediction: a text of {len(text)} characters has more than the {most} tokens of the context; shorten it",
            "prediction",
        )
    return pack_i32(ids)
