"""The receipt of an answer (`protocol/receipt.py`), from the router's state of its choice. Pure; loop thread."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from chitu import __version__
from chitu.protocol import KVLayout, unpack_i32
from chitu.protocol.receipt import Receipt, ReceiptSampling, sealed
from chitu.router.request import Generation


def receipt_of(model: str, layout: KVLayout, generation: Generation, num_tokens: int) -> Receipt:
    """Return the receipt. `model`: served name. `num_tokens`: tokens of the answer; D may have generated more before it
    received the end."""
    request, output = generation.request, generation.output
    reason = generation.finish.reason if generation.finish is not None else ""
    if reason not in ("stop", "length") or num_tokens < len(output):
        reason = "text"
    sampling = request.sampling
    if generation.is_checked:  # the cross-check's fields: no client asked for them
        sampling = msgspec.structs.replace(sampling, logprobs=None, transfer_sums=False)
    pairs = [one.decode if one.prefill is None else f"{one.prefill}-{one.decode}" for one in generation.attempts()]
    return sealed(
        Receipt(
            receipt=1,
            chitu=__version__,
            request_id=request.request_id,
            model=model,
            model_hash=layout.model_hash,
            dtype=cast(Any, layout.dtype),
            served=pairs,
            prompt_token_ids=unpack_i32(request.token_ids).tolist(),
            sampling=ReceiptSampling(**msgspec.structs.asdict(sampling)),
            token_ids=output[:num_tokens].tolist(),
            finish=cast(Any, reason),
        )
    )
