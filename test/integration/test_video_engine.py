"""Videos on a P and a D engine against transformers' own forward, which gets each video as one.

A video is given in parts, an image for each pair of frames. Every row of a prompt is compared, and decoded ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from image_checkpoints import (
    END,
    FAMILIES_WITH_VISION,
    FIRST_SPECIAL,
    IMAGE,
    START,
    VIDEO,
    Picture,
    PictureRequest,
)
from test_image_engine import BOUND, Pair, with_fields

from chitu.engine.executor import ImageSpan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]

SECONDS = 1.5
"""Between pairs of frames."""
TOKENS_PER_SECOND = 4
"""Of Qwen2.5-VL's config."""
BEGIN_VIDEO, END_VIDEO = 496, 497
"""What GLM's templates write around a video."""
RUNS, STAMPED, GLM = "runs", "stamped", "glm"
LAYOUTS = {"qwen2_5_vl": RUNS, "qwen3_vl": STAMPED, "qwen3_vl_moe": STAMPED, "qwen3_5": STAMPED, "glm4v_moe": GLM}
"""How each family's prompts have a video: all rows in one run, or each pair of frames behind its time."""
Media = tuple[int, int, int]
"""Pairs of frames (0: an image), height and width, in feature rows."""
PROMPTS: list[tuple[list[Media], int]] = [
    ([], 23),
    ([(3, 5, 4)], 20),
    ([(2, 6, 3), (0, 2, 3), (4, 3, 7)], 5),
    ([(0, 3, 3), (1, 1, 1), (2, 8, 2)], 1),
    ([(9, 2, 3)], 2),
]
"""The last one's time goes farther than the text behind its rows would be."""


@dataclass
class ClipRequest(PictureRequest):
    """A prompt with videos."""

    layout: str = RUNS
    media: list[Media] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    """0 for a text, 1 for an image, 2 for a video, by token."""

    @classmethod
    def with_clips(cls, name: str, media: Sequence[Media], seed: int, lead: int) -> ClipRequest:
        source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        request = cls(FAMILIES_WITH_VISION[name], [], layout=LAYOUTS[name], media=list(media))

        def words(count: int) -> None:
            request.write([source.randrange(FIRST_SPECIAL) for _ in range(count)])

        words(lead)
        for pairs, height, width in media:
            pictures = [request.family.picture((height, width), generator) for _ in range(max(1, pairs))]
            match request.layout if pairs else "":
                case "runs":
                    request.write([START])
                    for number, picture in enumerate(pictures):
                        time = int(number * SECONDS * TOKENS_PER_SECOND)
                        request.show(picture, VIDEO, 2, time=time, continues=number > 0)
                    request.write([END])
                case "stamped":
                    for picture in pictures:
                        words(4)
                        request.write([START])
                        request.show(picture, VIDEO, 2)
                        request.write([END])
                case "glm":
                    request.write([BEGIN_VIDEO])
                    for picture in pictures:
                        request.write([START])
                        request.show(picture, IMAGE, 2)
                        request.write([END])
                        words(1)
                    request.write([END_VIDEO])
                case _:
                    request.write([START])
                    request.show(pictures[0], IMAGE, 1)
                    request.write([END])
            words(source.randrange(21))
        words(7)
        return request

    def write(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.kinds += [0] * len(tokens)

    def show(self, picture: Picture, token: int, kind: int, **fields: Any) -> None:
        span = ImageSpan(len(self.tokens), picture.num_rows, picture.grid, **fields)
        self.spans.append((len(self.pictures), span))
        self.firsts.append(0)
        self.pictures.append(picture)
        self.tokens += [token] * picture.num_rows
        self.kinds += [kind] * picture.num_rows

    def reference(self, model: Any, generated: Sequence[int]) -> torch.Tensor:
        given: dict[str, Any] = {}
        left = iter(self.pictures)
        for pairs, height, width in self.media:
            name = "pixel_values_videos" if pairs else "pixel_values"
            grid = torch.tensor([[max(1, pairs), 2 * height, 2 * width]])
            given.setdefault(name, []).extend(next(left).patches["pixel_values"] for _ in range(max(1, pairs)))
            given.setdefault("video_grid_thw" if pairs else "image_grid_thw", []).append(grid)
        given = {name: torch.cat(parts) for name, parts in given.items()}
        ids = torch.tensor([[*self.tokens, *generated]])
        kinds = torch.tensor([self.kinds + [0] * len(generated)]).int()
        if self.layout == RUNS and self.media:
            given["second_per_grid_ts"] = torch.tensor([SECONDS] * len(self.media))
        if self.needs_positions:
            given["position_ids"] = torch.from_numpy(positions_by_hand(self, len(ids[0])))[:, None]
        if self.media:
            given["mm_token_type_ids"] = kinds
        model.model.rope_deltas = None
        with torch.inference_mode():
            logits_TV: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits[0]
        return logits_TV

    @property
    def needs_positions(self) -> bool:
        """Whether a video lasts longer than its frames are wide. Text behind it goes on behind its time, as the models
        were trained and as the library had it before it set the text behind the first frame."""
        longest = [int((pairs - 1) * SECONDS * TOKENS_PER_SECOND) + 1 for pairs, _, _ in self.media]
        sides = [max(media[1:]) for media in self.media]
        return self.layout == RUNS and any(t > side for t, side in zip(longest, sides, strict=True))


def positions_by_hand(request: ClipRequest, length: int) -> Any:
    """Return positions `[3, length]` of a video in one run by counting: each text behind the largest so far."""
    found: list[tuple[int, int, int]] = []
    media, kinds = iter(request.media), request.kinds + [0] * (length - len(request.kinds))
    following = 0
    while len(found) < length:
        places = [(0, 0, 0)]
        if kinds[len(found)]:
            pairs, height, width = next(media)
            step = SECONDS * TOKENS_PER_SECOND if pairs else 0
            times = [int(i * step) for i in range(max(1, pairs))]
            places = [(time, h, w) for time in times for h in range(height) for w in range(width)]
        found += [(following + time, following + h, following + w) for time, h, w in places]
        following += 1 + max(max(place) for place in places)
    return torch.tensor(found).T.numpy()


@pytest.fixture(scope="module", params=list(LAYOUTS))
def clips(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    name, prompts = request.param, PROMPTS
    if LAYOUTS[name] == GLM:  # the library takes no video beside an image there: both have the same token
        prompts = [([each for each in media if each[0]], lead) for media, lead in PROMPTS]
    requests = [ClipRequest.with_clips(name, media, seed, lead) for seed, (media, lead) in enumerate(prompts)]
    yield Pair(name, tmp_path_factory.mktemp(name), requests)


def test_rows_of_p_and_of_d_with_videos_are_those_of_transformers(
    clips: Pair, record_property: Callable[..., None]
) -> None:
    if clips.name == "qwen2_5_vl":
        assert [request.needs_positions for request in clips.requests] == [False, True, True, False, True]
    for chunk in (1, 37, 512):
        on_p, on_d = clips.run(chunk)
        record_property(f"chunks of {chunk}", f"P {max(on_p):.1e}, D {max(on_d):.1e}")
        assert max(on_p) < BOUND and max(on_d) < BOUND, (chunk, on_p, on_d)


def with_spans(clips: Pair, change: Callable[[int, ImageSpan], ImageSpan]) -> tuple[list[float], list[float]]:
    """Return the errors with other spans on P and D. `change` gets the number of the picture in its request, too."""
    right = [list(request.spans) for request in clips.requests]
    for request in clips.requests:
        request.spans = [(number, change(number, span)) for number, span in request.spans]
    try:
        return clips.run(37)
    finally:
        for request, spans in zip(clips.requests, right, strict=True):
            request.spans = spans


def test_times_that_are_not_scaled_and_frames_that_begin_anew_show(clips: Pair) -> None:
    if clips.name != "qwen2_5_vl":
        pytest.skip("the times of this family's frames are text")
    unscaled, _ = with_spans(clips, lambda _, span: with_fields(span, time=span.time // 6))
    assert unscaled[0] < BOUND and min(unscaled[1:]) > 100 * BOUND, unscaled
    anew, on_d = with_spans(clips, lambda _, span: with_fields(span, continues=False))
    assert anew[0] < BOUND and min(anew[1:]) > 100 * BOUND and min(on_d[1:]) > BOUND, (anew, on_d)


def test_frames_in_another_order_show(clips: Pair) -> None:
    right = clips.places[1]
    clips.places[1] = [right[1], right[0], *right[2:]]
    try:
        on_p, _ = clips.run(37)
    finally:
        clips.places[1] = right
    others = [error for slot, error in enumerate(on_p) if slot != 1]
    assert on_p[1] > 100 * BOUND and max(others) < BOUND, on_p


def test_a_time_that_is_lost_shows(clips: Pair) -> None:
    if LAYOUTS[clips.name] != STAMPED:
        pytest.skip("the times of this family's frames are no text before them")
    request = clips.requests[1]
    right, at = list(request.tokens), request.spans[1][1].start
    reference = request.reference(clips.theirs, ())
    request.tokens[at - 5 : at - 1] = [1] * 4
    lost = request.reference(clips.theirs, ())
    try:
        on_p, _ = clips.run(37)
    finally:
        request.tokens = right
    assert on_p[1] < BOUND  # the same words for both
    assert float((lost - reference).abs().max() / reference.abs().max()) > 100 * BOUND
