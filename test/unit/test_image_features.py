"""The store of features against a model that remembers every use, and the images of one prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.images import image, key_of

from chitu.errors import Internal
from chitu.instance.images import FeatureStore, PromptImages, StoredImage
from chitu.protocol import unpack_i32

NUM_ROWS = 10


class StoreModel:
    """What `FeatureStore` promises, by brute force: images in the order of their last use, with pins."""

    def __init__(self) -> None:
        self.found: list[StoredImage] = []
        """Images that can be found, the least recently used first."""
        self.pins: dict[StoredImage, int] = {}

    def rows_in_use(self) -> list[int]:
        kept = {image for image in self.found} | {image for image, pins in self.pins.items() if pins}
        return [row for image in kept for row in image.rows.tolist()]

    def make_room(self, num_rows: int) -> bool:
        pinned = sum(len(image.rows) for image, pins in self.pins.items() if pins)
        if num_rows > NUM_ROWS - pinned:
            return False
        for oldest in list(self.found):
            if NUM_ROWS - len(self.rows_in_use()) >= num_rows:
                break
            if not self.pins.get(oldest):
                self.found.remove(oldest)
        return True


@given(st.lists(st.tuples(st.sampled_from("frpuudx"), st.integers(0, 5), st.integers(1, 7)), max_size=60))
def test_the_store_keeps_pinned_images_and_gives_up_the_least_recently_used(steps: list[tuple[str, int, int]]) -> None:
    store, model = FeatureStore(NUM_ROWS), StoreModel()
    for what, name, number in steps:
        key, pinned = key_of(name), [image for image, pins in model.pins.items() if pins]
        known = next((image for image in model.found if image.key == key), None)
        if what in "fr":
            assert (key in store) == (known is not None) and store.find(key) is known
            if known is not None:
                model.found.remove(known)
                model.found.append(known)
            elif what == "r":
                has_room = model.make_room(number)
                made = store.reserve(key, number)
                assert (made is not None) == has_room
                if made is not None:
                    assert len(made.rows) == number and not set(made.rows.tolist()) & set(model.rows_in_use())
                    model.found.append(made)
        elif what == "p" and known is not None:
            store.pin(known)
            model.pins[known] = model.pins.get(known, 0) + 1
        elif what == "u" and pinned:
            chosen = pinned[number % len(pinned)]
            store.unpin(chosen)
            model.pins[chosen] -= 1
        elif what == "d" and number == 1:
            store.drop_all()
            model.found.clear()
        elif what == "x" and known is not None:
            store.discard(known)
            model.found.remove(known)
        in_use = model.rows_in_use()
        assert len(in_use) == len(set(in_use)), "a row is of two images"
        assert store.num_free == NUM_ROWS - len(in_use)
        assert store.num_pinned == sum(len(image.rows) for image, pins in model.pins.items() if pins)
    for image_, pins in model.pins.items():
        for _ in range(pins):
            store.unpin(image_)
    store.check_idle()


def test_a_store_that_leaks_says_so() -> None:
    store = FeatureStore(4)
    made = store.reserve(key_of(1), 3)
    assert made is not None
    store.pin(made)
    with pytest.raises(Internal, match="3 rows of features are pinned, 1 free and 3 kept of 4"):
        store.check_idle()


def placed(images: PromptImages) -> list[bytes]:
    return [span.rows for span in images.spans]


def test_spans_have_the_rows_of_their_part_of_an_image_as_long_as_it_is_placed() -> None:
    store = FeatureStore(NUM_ROWS)
    store.reserve(key_of(9), 3)
    made = store.reserve(key_of(1), 5)
    images = PromptImages((image(1, 2, 5, spans=2), image(2, 12, 2)))
    assert made is not None and images.next_missing is images.parts[0]
    assert images.place(made) == [(0, made.rows[:2].tobytes()), (1, made.rows[2:].tobytes())]
    assert unpack_i32(images.spans[1].rows).tolist() == made.rows[2:].tolist() and images.spans[2].rows == b""
    assert images.chunk_length(0, 20, 20) == 12 and images.next_missing is images.parts[1]
    assert images.pass_computed(5) == [] and images.pass_computed(8) == [made]
    assert placed(images) == [b"", b"", b""] and images.missing == images.parts[1:]
    assert images.place(made) and images.unplace() is made and placed(images) == [b"", b"", b""]


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 2))
def test_a_chunk_ends_where_it_may(start: int, length: int, most: int, is_whole: bool, num_placed: int) -> None:
    images = PromptImages((image(1, 3, 5), image(2, 14, 9, spans=2)), is_whole)
    images.pass_computed(start)
    made = StoredImage(key_of(1), np.arange(20, dtype=np.int32))
    for _ in range(min(num_placed, len(images.missing))):
        images.place(made)
    missing, length = images.next_missing, min(length, most)
    found = images.chunk_length(start, length, most)
    assert 0 <= found <= most
    if missing is not None:
        assert found == 0 or start + found <= missing.start
    inside = [part for part in images.parts if part.start < start + found < part.end]
    assert not (is_whole and found and inside)
    if not is_whole:
        assert found == length or (missing is not None and start + found == max(start, missing.start))
    elif not found:  # for want of features, or of a step that holds the rest of the image
        part = next(part for part in images.parts if part.start <= start < part.end)
        assert part is missing or part.end - start > most
