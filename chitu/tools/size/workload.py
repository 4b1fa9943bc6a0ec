"""Workloads: traces of requests as they are published or recorded, and their arrivals at any rate.

Two formats are read, one JSON object a line. Mooncake's (FAST'25): `timestamp` in ms, `input_length` and
`output_length` in tokens, and `hash_ids`, one for each block of 512 tokens, equal for equal beginnings. And the
router's own trace records (`trace.dir`, `trace.sample: 1`), of which the arrivals and lengths count; they do not say
which prompts begin alike.
"""

from __future__ import annotations

import bisect
import math
import random
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chitu.errors import ConfigError
from chitu.simulation.cluster import Arrival

BLOCK_TOKENS = 512
"""Tokens of a block of `hash_ids`."""
MAX_IMAGES = 64
"""Most images of a request."""
MAX_TOKENS = 1 << 22
"""Longest prompt or answer that a line may have: longer ones are damage."""


class Request(msgspec.Struct, frozen=True):
    """A request of a workload, with its arrival in seconds after the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks; empty if it shares nothing."""
    image_rows: tuple[int, ...] = ()
    """Feature rows of its images, which are the last of the prompt tokens but one."""

    def prompt(self) -> bytes | int:
        """Return tokens that are equal where the blocks are (int32 LE), or their number."""
        if not self.blocks:
            return self.prompt_tokens
        tokens = b"".join(struct.pack("<i", block) * BLOCK_TOKENS for block in self.blocks)
        num_text = self.prompt_tokens - sum(self.image_rows)
        return tokens[: 4 * num_text] + bytes(4 * sum(self.image_rows))


class Images(NamedTuple):
    """Images of a load."""

    per_request: float
    rows: int
    """Feature rows of each: the tokens that it takes in a prompt."""


def read_images(text: str) -> Images:
    """Return the images of `0.5:2040`: so many in a request, of so many rows. Raises ConfigError for any other
    spelling."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?):(\d+)", text)
    found = Images(float(match[1]), int(match[2])) if match else Images(0.0, 0)
    if not (0 < found.per_request <= MAX_IMAGES and 0 < found.rows <= MAX_TOKENS):
        raise ConfigError(
            f"--images is {text!r}; images in a request (up to {MAX_IMAGES}) and tokens of an image are expected, as "
            "in 0.5:2040"
        )
    return found


@dataclass(slots=True, frozen=True)
class Workload:
    """Requests in the order of their arrival."""

    requests: tuple[Request, ...]
    name: str

    @property
    def rate(self) -> float:
        """Requests a second as recorded; 0 if they all came at once."""
        duration_s = self.requests[-1].at_s - self.requests[0].at_s
        return (len(self.requests) - 1) / duration_s if duration_s else 0.0

    @property
    def mean_prompt(self) -> float:
        """Prompt tokens of a request."""
        return sum(request.prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def mean_output(self) -> float:
        """Output tokens of a request."""
        return sum(request.output_tokens for request in self.requests) / len(self.requests)

    def arrivals(self, rate: float, seed: int = 0, is_poisson: bool = False) -> Iterator[Arrival]:
        """Yield the requests at so many a second: with the recorded gaps, stretched, or as a Poisson process."""
        rng, scale, at_s = random.Random(seed), self.rate / rate, 0.0
        for request in self.requests:
            if is_poisson or not scale:
                at_s += rng.expovariate(rate)
            else:
                at_s = (request.at_s - self.requests[0].at_s) * scale
            yield Arrival(at_s, request.prompt(), request.output_tokens, request.image_rows)

    @property
    def mean_image_rows(self) -> float:
        """Feature rows of a request."""
        return sum(sum(request.image_rows) for request in self.requests) / len(self.requests)

    def with_images(self, images: Images) -> Workload:
        """Return the same requests with new images, spread evenly, whose rows come on top of their prompts."""
        requests, given = [], 0
        for number, request in enumerate(self.requests, 1):
            count = math.floor(number * images.per_request + 1e-9) - given
            given += count
            rows = (images.rows,) * count
            more = request.prompt_tokens + sum(rows)
            requests.append(msgspec.structs.replace(request, prompt_tokens=more, image_rows=rows))
        return Workload(tuple(requests), f"{self.name}, {images.per_request:g} images of {images.rows} rows")


def fixed(prompt_tokens: int, output_tokens: int, count: int) -> Workload:
    """Return requests that are all alike and share nothing."""
    requests = (Request(float(number), prompt_tokens, output_tokens) for number in range(count))
    return Workload(tuple(requests), f"{prompt_tokens} prompt tokens, {output_tokens} output tokens")


def read_workload(path: str | Path, most: int | None = None) -> Workload:
    """Read a trace, at most its first `most` requests. Raises ConfigError, with file and line, for a bad line."""
    requests: list[Request] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = _read_line(line)
                except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                    raise ConfigError(f"{path}, line {number}: {_reason(error)}") from error
                if found is not None:
                    requests.append(found)
                if most is not None and len(requests) >= most:
                    break
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the trace {path} cannot be read: {reason}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests (expected lines with timestamp, input_length and output_length)")
    requests.sort(key=lambda request: request.at_s)
    return Workload(tuple(requests), Path(path).name)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing (expected timestamp, input_length, output_length, and hash_ids or none)"
    return str(error)


def _read_line(line: str) -> Request | None:
    """Return the request of a line; None for a record of something else."""
    record = msgspec.json.decode(line)
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    return _of_record(record) if "kind" in record else _of_mooncake(record)


def _of_mooncake(record: dict[str, Any]) -> Request:
    prompt, output = _tokens(record, "input_length"), _tokens(record, "output_length")
    stamp, blocks = record["timestamp"], record.get("hash_ids", [])
    if not isinstance(stamp, int | float) or stamp < 0:
        raise ValueError(f"timestamp is {stamp!r}; milliseconds of at least 0 are expected")
    if not isinstance(blocks, list) or not all(isinstance(b, int) and 0 <= b < 1 << 30 for b in blocks):
        raise ValueError("hash_ids is no list of numbers from 0 to 2**30 - 1")
    if blocks and not len(blocks) * BLOCK_TOKENS >= prompt > (len(blocks) - 1) * BLOCK_TOKENS:
        raise ValueError(f"{len(blocks)} hash_ids of {BLOCK_TOKENS} tokens do not fit input_length {prompt}")
    return Request(stamp / 1000, prompt, output, tuple(blocks))


def _tokens(record: dict[str, Any], key: str) -> int:
    value = record[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{key} is {value!r}; a number from 1 to {MAX_TOKENS} is expected")
    return value


def _of_record(record: dict[str, Any]) -> Request | None:
    if record["kind"] != "request" or not record["choices"]:
        return None
    last = record["choices"][0][-1]
    if not last["output_tokens"]:
        return None
    return Request(record["arrived_s"], _tokens(last, "prompt_tokens"), _tokens(last, "output_tokens"))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the sorted values lies; NaN without values."""
    if not values:
        return float("nan")
    return values[min(len(values) - 1, bisect.bisect_left(range(len(values)), share * len(values)))]
