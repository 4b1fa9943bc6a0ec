"""`chitu size`: reads the question, searches, and says the answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from chitu.errors import ConfigError
from chitu.simulation.profile import EngineProfile, read_profile
from chitu.tools.size import report
from chitu.tools.size.search import Question, Shape, Slo, search
from chitu.tools.size.workload import Workload, fixed, read_images, read_workload


@dataclass(slots=True, frozen=True)
class SizeOptions:
    slo: str
    """`ttft=2,tpot=0.05`, in seconds."""
    devices: int
    profiles: tuple[str, ...]
    trace: str | None = None
    lengths: str | None = None
    """`1000:200`, prompt and output tokens, in place of a trace."""
    requests: int = 2000
    share: float = 0.9
    is_poisson: bool = False
    seed: int = 0
    plot: str | None = None
    is_json: bool = False
    draft_acceptance: float = 0.0
    images: str | None = None
    """`0.5:2040`, images in a request and rows of each."""
    encode_rate: float | None = None
    """Feature rows a second of an E, and of a P that encodes itself, in place of the profiles'."""
    encoders: int | None = None
    """Number of E; None: any."""


def size(options: SizeOptions, console: Console, say: Callable[[str], None]) -> int:
    """Search and print; return the exit code. Raises ConfigError for what cannot be understood or kept."""
    if options.devices < 1:
        raise ConfigError(f"--devices is {options.devices}; at least 1 is expected")
    if not 0 < options.share < 1:
        raise ConfigError(f"--share is {options.share:g}; a share between 0 and 1 is expected, such as 0.9")
    slo = Slo(*read_slo(options.slo), options.share)
    if not 0 <= options.draft_acceptance < 1:
        raise ConfigError(f"--draft-acceptance is {options.draft_acceptance:g}; a share from 0, below 1, is expected")
    profiles = read_profiles(options.profiles)
    if options.draft_acceptance:
        drafting = {"draft_acceptance": options.draft_acceptance}
        profiles = {size: msgspec.structs.replace(profile, **drafting) for size, profile in profiles.items()}
    workload, is_poisson = _workload(options)
    if options.images is not None:
        workload, profiles = _with_images(options, workload, profiles)
    elif options.encode_rate is not None or options.encoders is not None:
        raise ConfigError("--encode-rate and --encoders are about images: give --images COUNT:ROWS")
    _check_fits(workload, profiles)
    if options.plot is not None:
        report.require_matplotlib()
    question = Question(workload, slo, profiles, is_poisson, options.seed, say, options.encoders)
    sizing = search(question, options.devices)
    if options.is_json:
        console.out(msgspec.json.encode(report.as_json(question, options.devices, sizing)).decode(), highlight=False)
    else:
        report.show(question, options.devices, sizing, console)
    if options.plot is not None:
        report.plot(report.curves(question, sizing), question, Path(options.plot), say)
    return 0


def read_slo(text: str) -> tuple[float, float]:
    """Return the seconds of `ttft=2,tpot=0.05`. Raises ConfigError for any other spelling."""
    found = dict(re.findall(r"(?:^|,)\s*(ttft|tpot)=([0-9.eE+-]+)\s*(?=,|$)", text))
    try:
        ttft_s, tpot_s = float(found["ttft"]), float(found["tpot"])
    except (KeyError, ValueError):
        ttft_s = tpot_s = math.nan
    if not (0 < ttft_s < math.inf and 0 < tpot_s < math.inf) or len(text.split(",")) != 2:
        raise ConfigError(f"--slo is {text!r}; both bounds in seconds are expected, as in ttft=2,tpot=0.05")
    return ttft_s, tpot_s


def read_profiles(paths: Sequence[str]) -> dict[Shape, EngineProfile]:
    """Return the profiles by the shape of their instances. Raises ConfigError if there are none, or two of one."""
    if not paths:
        raise ConfigError("--profile is missing: a file that `chitu bench profile` has written on your devices")
    profiles: dict[Shape, EngineProfile] = {}
    for path in paths:
        profile = read_profile(path)
        shape = Shape(profile.tp_size, profile.dp_size)
        if shape in profiles:
            dp = f" and dp_size {shape.dp}" if shape.dp > 1 else ""
            raise ConfigError(f"--profile: two profiles have tp_size {shape.tp}{dp}; give one of each size")
        profiles[shape] = profile
    return profiles


def _workload(options: SizeOptions) -> tuple[Workload, bool]:
    if (options.trace is None) == (options.lengths is None):
        raise ConfigError("give either --trace FILE or --lengths PROMPT:OUTPUT")
    if options.trace is not None:
        workload = read_workload(options.trace, options.requests)
        return workload, options.is_poisson or not workload.rate
    match = re.fullmatch(r"(\d+):(\d+)", options.lengths or "")
    if match is None or not all(int(number) for number in match.groups()):
        raise ConfigError(f"--lengths is {options.lengths!r}; prompt and output tokens are expected, as in 1000:200")
    prompt, output = map(int, match.groups())
    return fixed(prompt, output, options.requests), True


def _with_images(
    options: SizeOptions, workload: Workload, profiles: dict[Shape, EngineProfile]
) -> tuple[Workload, dict[Shape, EngineProfile]]:
    """Return the load with its images, and the profiles with the rate that is given. Raises ConfigError if there is
    none, or if an image does not fit."""
    images, rate = read_images(options.images or ""), options.encode_rate
    if options.encoders is not None and options.encoders < 0:
        raise ConfigError(f"--encoders is {options.encoders}; at least 0 is expected")
    if rate is not None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"--encode-rate is {rate:g}; rows a second above 0 are expected")
        given = {"row_s": 1 / rate}
        profiles = {
            shape: msgspec.structs.replace(profile, images=msgspec.structs.replace(profile.images, **given))
            for shape, profile in profiles.items()
        }
    for profile in profiles.values():
        if not profile.images.row_s:
            raise ConfigError(
                f"the profile {profile.name!r} has no time of images (images.row_s is 0): measure it while images are "
                "served, or give --encode-rate ROWS_PER_SECOND"
            )
        if images.rows > profile.images.region_rows:
            raise ConfigError(
                f"--images: an image of {images.rows} rows; the profile {profile.name!r} has room for "
                f"{profile.images.region_rows} (images.region_rows)"
            )
    return workload.with_images(images), profiles


def _check_fits(workload: Workload, profiles: dict[Shape, EngineProfile]) -> None:
    """Raise ConfigError if an instance is too small for a request."""
    longest = max(request.prompt_tokens + request.output_tokens for request in workload.requests)
    for profile in profiles.values():
        most = min(profile.max_model_len, profile.num_pages * profile.page_size)
        if longest > most:
            raise ConfigError(
                f"{workload.name} has a request of {longest} tokens; an instance of the profile {profile.name!r} "
                f"(tp_size {profile.tp_size}) holds {most}"
            )
