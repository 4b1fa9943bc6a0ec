"""`chitu replay FILE`: checks whether an engine reproduces the tokens of receipts. Blocking; in the caller's thread.

The engine is a unified one with the model's folder that is started here, or any running cluster. The receipts are
replayed without its prefix cache. `client/verify/receipts.py` defines what counts as the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chitu.client.client import RouterClient
from chitu.client.verify.probe import Impossible, Prober
from chitu.client.verify.receipts import Replayed, Saved, replay
from chitu.config.load import api_key
from chitu.launch.plan import Entries
from chitu.launch.reference import EngineShape, engine, layout_of
from chitu.models.config import read_model_spec

PAGE_SIZE = 16
"""Page size of the engine that is started."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    url: str | None
    """URL of a running cluster; None: an engine with `model` is started."""
    model: str | None = None
    """Checkpoint folder of the engine to start."""
    device: str = "cpu"
    """Device of the engine that is started."""
    concurrency: int = 2
    """Number of requests at once."""
    timeout_s: float = 600.0
    """Timeout of one answer."""
    entries: Entries | None = None


def replay_receipts(options: ReplayOptions, saved: Sequence[Saved], say: Callable[[str], None]) -> list[Replayed]:
    """Return a result for each receipt. Raise Impossible if there is no engine for them, and the errors of
    `LocalCluster` and `RouterClient`."""
    with contextlib.ExitStack() as stack:
        if options.url is not None:
            client = RouterClient(options.url, api_key())
        else:
            assert options.model is not None
            receipts = [one.receipt for one in saved]
            dtypes = {receipt.dtype for receipt in receipts}
            if len(dtypes) > 1:
                raise Impossible(f"receipts of {' and '.join(sorted(dtypes))}: replay those of one dtype at a time")
            longest = max(len(receipt.prompt_token_ids) + receipt.sampling.max_tokens for receipt in receipts)
            most = read_model_spec(options.model, None).max_model_len
            shape = EngineShape(receipts[0].dtype, min(longest + 1, most), PAGE_SIZE)
            client = stack.enter_context(engine(options.model, options.device, shape, options.entries, say))
        cluster = client.cluster()
        layout = layout_of(cluster)
        if layout is None:
            raise Impossible(f"{client.url} cannot serve")
        prober = Prober(client, cluster.model, 1, options.timeout_s)
        say(f"replaying {len(saved)} receipts at {client.url}")
        with ThreadPoolExecutor(options.concurrency) as pool:
            return list(pool.map(lambda one: replay(one, prober, layout.model_hash, layout.dtype), saved))
