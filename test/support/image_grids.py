"""What the image processors of `transformers` make of images of given sizes: `python -m support.image_grids`, which
reads {folder: [[width, height], ...]} and writes {folder: [what their outputs say, or null if refused]}, as JSON."""

from __future__ import annotations

import json
import sys

from PIL import Image

from chitu.config.schema import ImagesConfig
from chitu.images.child import LoadedProcessor
from chitu.images.forms import image_model_of


def main() -> None:
    wanted: dict[str, list[tuple[int, int]]] = json.load(sys.stdin)
    found = {}
    for folder, sizes in wanted.items():
        model = image_model_of(folder)
        assert not isinstance(model, str), model
        loaded = LoadedProcessor(model.spec, ImagesConfig())
        found[folder] = [_outputs(loaded.processor, dict(model.spec.options), *size) for size in sizes]
    assert "torch" not in sys.modules
    json.dump(found, sys.stdout)


def _outputs(processor, options, width: int, height: int):  # type: ignore[no-untyped-def]
    try:
        made = processor(images=[Image.new("RGB", (width, height))], return_tensors="np", **options)
    except ValueError:
        return None
    names = ("image_grid_thw", "image_sizes", "num_patches")
    return {"shape": made["pixel_values"].shape, **{name: made[name].tolist()[0] for name in names if name in made}}


if __name__ == "__main__":
    main()
