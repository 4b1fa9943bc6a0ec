"""How fast an engine is: seconds of a step as a function of what is in it, and what it has room for.

Measured by `chitu bench profile`, kept as one JSON file, read by `chitu size`. Units are in the names. The model of a
step is linear: what it costs at all, each prompt token, each pair of a prompt token and one that it attends to, each
sequence that decodes, and each token of their contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from chitu.engine.executor import MAX_DRAFT, StepSizes, TowerCost
from chitu.errors import ConfigError
from chitu.known_types import known

VERSION = 1
TOWER_BLOCKS = 24
"""Blocks of a vision tower, between which others get their turns."""


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step, as in `StepRates`: a step with both chunks and decodes costs both."""

    prefill_s: float = 0.0
    """Any step that computes prompts."""
    prompt_token_s: float = 0.0
    """Each prompt token in it."""
    prompt_pair_s: float = 0.0
    """Each pair of such a token and one that it attends to."""
    decode_s: float = 0.0
    """Any step in which sequences decode."""
    sequence_s: float = 0.0
    """Each of them."""
    context_s: float = 0.0
    """Each token that is in their KV cache."""
    first_token_s: float = 0.0
    """A step that only samples first tokens from logits rows."""
    turn_s: float = 0.0
    """What the scheduler's thread needs between two steps. With overlapping steps it is hidden behind the device."""

    def seconds(self, prompt_tokens: float, pairs: float, sequences: float, context_tokens: float) -> float:
        """Return the seconds of a step with these prompt tokens and pairs, decoding sequences and their contexts."""
        seconds = 0.0 if prompt_tokens or sequences else self.first_token_s
        if prompt_tokens:
            seconds += self.prefill_s + prompt_tokens * self.prompt_token_s + pairs * self.prompt_pair_s
        if sequences:
            seconds += self.decode_s + sequences * self.sequence_s + context_tokens * self.context_s
        return seconds


class StepLoad(NamedTuple):
    """What an instance, or a member of a group, computes in a step."""

    prompt_tokens: int = 0
    pairs: float = 0.0
    sequences: int = 0
    context_tokens: int = 0

    @property
    def sizes(self) -> StepSizes:
        return StepSizes(self.prompt_tokens, self.sequences)


class ExchangeCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a step of members that share experts takes longer, over all layers. 0 if `cost` was measured with
    such members: it is in their steps."""

    step_s: float = 0.0
    """The agreement, and the calls of all layers."""
    row_s: float = 0.0
    """Each row of the member that has the most: all are padded to that."""


class LinkCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of what passes between processes."""

    bytes_per_s: float = 1e9
    """Of KV from a P, and into a D."""
    write_s: float = 0.0
    """Each write of KV or of a logits row, beside its bytes."""
    message_s: float = 0.0002
    """A message between router and instance, or between P and D."""


class ImageCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What images take. An image is counted in feature rows: the tokens that it takes in a prompt."""

    row_s: float = 0.0
    """Seconds of a row on an E, and on an instance that encodes its images itself; 0: not measured."""
    row_bytes: float = 8192.0
    """Bytes of a row, on their way from an E to a P."""
    region_rows: int = 16384
    """Rows that an E, and a P, have for features (`cache.image_rows`)."""


class EngineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance of `dp_size` members, which have `tp_size` devices each. `cost` and all sizes are of one member."""

    cost: StepCost
    link: LinkCost = LinkCost()
    name: str = "unnamed"
    """Model and device, for people."""
    version: int = VERSION
    tp_size: int = 1
    """Devices of a member."""
    dp_size: int = 1
    """Members of an instance."""
    experts: Literal["cut", "spread"] = "cut"
    """`spread`: the members share experts, so they step together."""
    expert_share: float = 0.0
    """Share of the time of a step that the experts take. It falls on all members alike; the rest lasts as long as on
    the member that has the most to do."""
    exchange: ExchangeCost = ExchangeCost()
    num_pages: int = 4096
    """Pages of a member."""
    page_size: int = 16
    kv_bytes_per_token: int = 1024
    """Over all layers and ranks."""
    num_layers: int = 4
    """Layers; KV leaves by layers while the next ones are computed."""
    vocab_size: int = 32000
    """Numbers of 4 bytes in a logits row."""
    max_model_len: int = 1 << 20
    max_running_requests: int = 64
    """Most sequences that decode at once: executor slots, and the largest batch that was measured."""
    max_batched_tokens: int = 2048
    chunk_size: int = 512
    """Prompt tokens of a step, and of one request in a step."""
    overlap: bool = False
    """Whether a step is launched before the one before is read (`scheduler.overlap`)."""
    draft_acceptance: float = 0.0
    """Share of drafted tokens that are right (`chitu_draft_tokens_total`); 0: nothing is drafted."""
    images: ImageCost = ImageCost()
    measured: dict[str, Any] = {}
    """Where the numbers come from: machine, commit, error of the fit."""

    @property
    def tower(self) -> TowerCost | None:
        """Cost of the vision tower in tokens of a prompt, by which an instance encodes in turns; None: in one piece."""
        block_s = self.images.row_s / TOWER_BLOCKS
        token_s = self.cost.prompt_token_s
        return TowerCost(TOWER_BLOCKS, block_s / token_s, 0.0) if block_s and token_s else None

    @property
    def devices(self) -> int:
        """Devices of an instance."""
        return self.tp_size * self.dp_size

    def seconds(self, loads: Sequence[StepLoad]) -> float:
        """Return the seconds of a step with these loads of an instance, or of all members with any of a group that
        steps together."""
        own_s = max([self.cost.seconds(*load) for load in loads])
        if self.experts == "cut" or self.dp_size == 1:
            return own_s
        prompt, pairs, sequences, context = (sum(column) / self.dp_size for column in zip(*loads, strict=True))
        if not prompt and not sequences:
            return own_s
        mean_s = self.cost.seconds(prompt, pairs, sequences, context)
        most = max(load.sizes.rows for load in loads)
        own_s += self.expert_share * (mean_s - own_s)
        return own_s + self.exchange.step_s + most * self.exchange.row_s

    def even_s(self, prompt_tokens: int, pairs: float, sequences: int, context_tokens: int) -> float:
        """Return the seconds of a step in which each member has this load."""
        return self.seconds([StepLoad(prompt_tokens, pairs, sequences, context_tokens)] * self.dp_size)

    def token_s(self, batch: int, context: float) -> float:
        """Return the mean seconds from a request's token to its next in steps of such a batch on each member, with so
        many tokens in the context of each and drafts as long as they pay."""
        least_s, tokens = math.inf, 0.0
        for length in range(MAX_DRAFT + 1 if self.draft_acceptance else 1):
            tokens += self.draft_acceptance**length
            rows = batch * (1 + length)
            least_s = min(least_s, (self.cost.turn_s + self.even_s(0, 0, rows, int(rows * context))) / tokens)
        return least_s


def read_profile(path: str | Path) -> EngineProfile:
    """Read a profile. Raises ConfigError, with the file and the key, if it is none."""
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=known(EngineProfile))
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no engine profile (`chitu bench profile` makes one): {error}") from error
    if profile.version != VERSION:
        raise ConfigError(f"{path}: version is {profile.version}; this release reads {VERSION}: measure it again")
    for part in (profile.cost, profile.link, profile.exchange, profile.images):
        for key, value in msgspec.structs.asdict(part).items():
            if not 0 <= value < math.inf or (key in ("bytes_per_s", "region_rows") and not value):
                raise ConfigError(f"{path}: {key} is {value}; a number of at least 0 is expected")
    for name in ("draft_acceptance", "expert_share"):
        if not 0 <= getattr(profile, name) < 1:
            raise ConfigError(f"{path}: {name} is {getattr(profile, name)}; a share below 1 is expected")
    for key, value in msgspec.structs.asdict(profile).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ConfigError(f"{path}: {key} is {value}; at least 1 is expected")
    if not any(msgspec.structs.astuple(profile.cost)):
        raise ConfigError(f"{path}: all step costs are 0; such an engine has no limit")
    return profile


def write_profile(profile: EngineProfile, path: str | Path) -> None:
    """Write a profile for `read_profile`."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
