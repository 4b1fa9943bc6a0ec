"""How the prompts of each family of models have images, and which image processor of `transformers` makes its patches.

Read from a model's folder (config.json, preprocessor_config.json, processor_config.json and the tokenizer's files)
without importing `transformers`. What is said here of a family, its `MeasureKind` computes (`child.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from chitu.errors import ConfigError
from chitu.images.layout import Grid, ImageForm, ImageLayout, Run, VideoForm
from chitu.images.videos import FPS, FRAMES, MAX_FPS, VideoKind, VideoSpec
from chitu.protocol import IMAGE_KEY_BYTES, image_key
from chitu.tokenizer.added_tokens import read_json

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
BACK_END = "pil"
"""The back end of the image processors. `transformers` would choose another one, with other pixels, where torchvision
is installed."""
NO_FORM = {
    "llama4": "its image processor in transformers needs torchvision, which chooses other pixels by its version",
    "paligemma": "its whole prompt attends to itself, which is not built",
}
"""Families that are refused for a reason of their own."""
_SHARED = {
    "patch_size": 0,
    "merge_size": 2,
    "temporal_patch_size": FRAMES,
    "image_mean": None,
    "image_std": None,
    "rescale_factor": None,
    "do_rescale": True,
    "do_normalize": True,
    "resample": None,
}
"""Settings that a folder must have alike for images and for videos: the image processor makes patches of both."""
MeasureKind = Literal["qwen", "glm", "lines", "tiles", "fixed"]
"""How the rows of an image follow from its size. `qwen`, `glm`: a grid of merged patches; `lines`: the same, line by
line; `tiles`: as many for each tile; `fixed`: as many for any image."""


class ProcessorSpec(msgspec.Struct, frozen=True):
    """What a process needs to make patches as the model's folder says."""

    folder: str
    module: str
    class_name: str
    kind: MeasureKind
    options: dict[str, int | bool] = {}
    """Arguments of its calls, beyond the folder's settings."""
    video: VideoSpec | None = None
    """None: it takes no videos."""


class ImageModel(NamedTuple):
    """All that a folder says of images."""

    form: ImageForm
    spec: ProcessorSpec
    rows: int = 0
    """Rows of an image (`fixed`), or of one of its tiles (`tiles`)."""
    line_end: int = -1
    """Token behind each line but the last (`lines`)."""
    end: int = -1
    """Token behind the last line."""

    def layout(self, grid: Grid) -> ImageLayout:
        """Return the tokens of an image with this grid, as `measured` returns it."""
        token, (times, height, width) = self.form.token_id, grid
        match self.spec.kind:
            case "fixed":
                return ImageLayout((Run(token, self.rows),))
            case "tiles":
                return ImageLayout((Run(token, times * self.rows),))
            case "lines":
                line, ends = Run(token, width), [self.line_end] * (height - 1) + [self.end]
                return ImageLayout(tuple(run for end in ends for run in (line, Run(end, 1, is_image=False))))
            case _:
                return ImageLayout((Run(token, times * height * width),), grid)


class _Folder:
    """The files of a model that say something of images."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / "config.json")
        nested = read_json(self.path / PROCESSOR)
        self.processor = {key: value for key, value in nested.items() if key != "image_processor"}
        self._nested_video: Mapping[str, Any] = nested.get("video_processor") or {}
        self.image_processor: Mapping[str, Any] = read_json(self.path / PREPROCESSOR) or nested.get(
            "image_processor", {}
        )
        self._ids: dict[str, int] | None = None

    @property
    def video_processor(self) -> Mapping[str, Any]:
        """Settings for videos; those for images where the folder has none, as the library reads them."""
        return self._nested_video or read_json(self.path / VIDEO_PREPROCESSOR) or self.image_processor

    def token_ids(self) -> dict[str, int]:
        """Return the ids of the added tokens, by their text."""
        if self._ids is None:
            declared = read_json(self.path / "tokenizer_config.json").get("added_tokens_decoder") or {}
            self._ids = {str(token["content"]): int(number) for number, token in declared.items()}
            if not self._ids:
                added = read_json(self.path / "tokenizer.json").get("added_tokens") or []
                self._ids = {str(token["content"]): int(token["id"]) for token in added}
        return self._ids

    def id_of(self, text: str) -> int:
        found = self.token_ids().get(text)
        if found is None:
            raise _NoForm(f"its tokenizer has no token {text!r}")
        return found

    def text_of(self, key: str) -> str:
        """Return the text of the token whose id config.json has under `key`."""
        wanted = self.number(key)
        for text, token in self.token_ids().items():
            if token == wanted:
                return text
        raise _NoForm(f"its tokenizer has no added token {wanted}, which is {key} in config.json")

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return a whole number of config.json, under the first of these keys that it has."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise _NoForm(f"config.json has no {keys[0]}")
        return default


class _NoForm(Exception):
    """Why the prompts of a folder's model have no images."""


class _Parts(NamedTuple):
    """What a family reads from a folder."""

    placeholder: str
    written: str
    token_id: int
    rows: int = 0
    line_end: int = -1
    end: int = -1
    options: dict[str, int | bool] = {}


def _of_qwen(folder: _Folder) -> _Parts:
    image = folder.text_of("image_token_id")
    return _Parts(image, image, folder.number("image_token_id"))


def _of_gemma(folder: _Folder) -> _Parts:
    if folder.image_processor.get("do_pan_and_scan"):
        raise _NoForm("do_pan_and_scan is set in its preprocessor_config.json: crops of images are not built")
    keys = ("image_token_index", "image_token_id")
    image = folder.text_of(next((key for key in keys if key in folder.config), keys[0]))
    begin, end = folder.text_of("boi_token_index"), folder.text_of("eoi_token_index")
    rows = folder.number("mm_tokens_per_image", default=256)
    if folder.processor.get("image_seq_length", rows) != rows:
        raise _NoForm(f"image_seq_length in {PROCESSOR} is not mm_tokens_per_image ({rows}) in config.json")
    return _Parts(begin, f"\n\n{begin}{image}{end}\n\n", folder.id_of(image), rows)


def _of_pixtral(folder: _Folder) -> _Parts:
    vision, processor = folder.config.get("vision_config") or {}, folder.processor
    if folder.config["model_type"] == "llava" and vision.get("model_type") != "pixtral":
        raise _NoForm(f"images of llava with a vision tower {vision.get('model_type')!r} are not built")
    patch, merge = vision.get("patch_size", 16), folder.number("spatial_merge_size", default=1)
    if (processor.get("patch_size", patch), processor.get("spatial_merge_size", merge)) != (patch, merge):
        raise _NoForm(f"patch_size and spatial_merge_size in {PROCESSOR} are not those of config.json")
    image = processor.get("image_token", "[IMG]")
    token = folder.id_of(image)
    if token != folder.number("image_token_index", "image_token_id", default=token):
        raise _NoForm(f"the token {image!r} of {PROCESSOR} is not image_token_index in config.json")
    line_end = folder.id_of(processor.get("image_break_token", "[IMG_BREAK]"))
    end = folder.id_of(processor.get("image_end_token", "[IMG_END]"))
    return _Parts(image, image, token, line_end=line_end, end=end, options={"patch_size": patch * merge})


def _of_internvl(folder: _Folder) -> _Parts:
    image, tokens = folder.text_of("image_token_id"), read_json(folder.path / "tokenizer_config.json")
    begin, end = tokens.get("start_image_token", "<img>"), tokens.get("end_image_token", "</img>")
    folder.id_of(begin), folder.id_of(end)
    rows = folder.number("image_seq_length", default=256)
    if folder.processor.get("image_seq_length", rows) != rows:
        raise _NoForm(f"image_seq_length in {PROCESSOR} is not that of config.json ({rows})")
    token = folder.number("image_token_id")
    return _Parts(image, f"{begin}{image}{end}", token, rows, options={"crop_to_patches": True})


class _Family(NamedTuple):
    module: str
    """Below `transformers.models`."""
    class_name: str
    kind: MeasureKind
    read: Callable[[_Folder], _Parts]

    video: Callable[[_Folder], tuple[VideoForm, VideoSpec]] | None = None
    """None: its processor takes no videos."""


def _video_spec(folder: _Folder, kind: VideoKind, patch: int, least: int, most: int) -> VideoSpec:
    """Return what the settings say. `patch`, `least`, `most`: what the library takes where they say nothing: the side
    of a patch, and the pixels of its smallest and largest size."""
    told, images = folder.video_processor, folder.image_processor
    for key, default in _SHARED.items():
        if told.get(key, images.get(key, default)) != images.get(key, told.get(key, default)):
            raise _NoForm(f"{key} is {told.get(key)!r} for videos, and {images.get(key)!r} for images")
    if told.get("temporal_patch_size", FRAMES) != FRAMES or told.get("do_resize") is False:
        raise _NoForm(f"temporal_patch_size is not {FRAMES} or do_resize is false: that is not built for videos")
    size = told.get("size") or {}
    fps = float(told.get("fps") or FPS)
    numbers = {
        "min_pixels": int(told.get("min_pixels") or size.get("shortest_edge") or least),
        "max_pixels": int(told.get("max_pixels") or size.get("longest_edge") or most),
        "factor": int(told.get("patch_size") or patch) * int(told.get("merge_size") or 2),
        "min_frames": int(told.get("min_frames") or 4),
        "max_frames": int(told.get("max_frames") or 768),
    }
    if not 0 < fps <= MAX_FPS or min(numbers.values()) < 1:
        raise _NoForm(f"fps {fps:g} and {numbers} are impossible for videos")
    caps = int(told.get("max_video_tokens") or (128000 if kind == "qwen2" else 768))
    seconds = float(told.get("max_duration") or 300)
    capped = caps if told.get("cap_pixels_per_frame") else 0
    return VideoSpec(kind, **numbers, fps=fps, max_seconds=seconds, cap_tokens=capped)


def _video_of_qwen2(folder: _Folder) -> tuple[VideoForm, VideoSpec]:
    spec = _video_spec(folder, "qwen2", 14, 128 * 28 * 28, 28 * 28 * 768)
    if folder.config["model_type"] == "qwen2_5_vl":
        speed = float((folder.config.get("vision_config") or {}).get("tokens_per_second") or 4)
        spec = msgspec.structs.replace(spec, tokens_per_second=speed)
    token = folder.text_of("video_token_id")
    return VideoForm(token, token, folder.number("video_token_id"), is_run=True), spec


def _video_of_qwen3(folder: _Folder) -> tuple[VideoForm, VideoSpec]:
    spec = _video_spec(folder, "qwen3", 16, 128 * 32 * 32, 32 * 32 * 768)
    token = folder.text_of("video_token_id")
    begin, end = folder.text_of("vision_start_token_id"), folder.text_of("vision_end_token_id")
    written = f"<{{seconds:.1f}} seconds>{begin}{token}{end}"
    return VideoForm(f"{begin}{token}{end}", written, folder.number("video_token_id"), is_run=False), spec


def _video_of_glm(folder: _Folder) -> tuple[VideoForm, VideoSpec]:
    spec = _video_spec(folder, "glm", 14, 112 * 112, 28 * 28 * 2 * 30000)
    image, begin, end = folder.text_of("image_token_id"), "<|begin_of_image|>", "<|end_of_image|>"
    folder.id_of(begin), folder.id_of(end)
    written = f"{begin}{image}{end}{{seconds:.0f}}"
    return VideoForm(folder.text_of("video_token_id"), written, folder.number("image_token_id"), is_run=False), spec


_QWEN = _Family("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil", "qwen", _of_qwen)
_GLM = _Family("glm4v.image_processing_pil_glm4v", "Glm4vImageProcessorPil", "glm", _of_qwen, _video_of_glm)
_PIXTRAL = _Family("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil", "lines", _of_pixtral)
FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN._replace(video=_video_of_qwen2)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN._replace(video=_video_of_qwen3)),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _GLM),
    **dict.fromkeys(("mistral3", "llava"), _PIXTRAL),
    "gemma3": _Family("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil", "fixed", _of_gemma),
    "internvl": _Family("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil", "tiles", _of_internvl),
}
"""By `model_type` in config.json."""


def has_vision(folder: str | Path) -> bool:
    """Return whether the model in a folder has a part for images, whatever becomes of it here."""
    return bool(read_json(Path(folder) / "config.json").get("vision_config"))


def form_of(folder: str | Path) -> ImageForm | str:
    """Return how the prompts of the model in a folder have images, or why they cannot have any: a sentence."""
    found = image_model_of(folder)
    return found if isinstance(found, str) else found.form


def image_model_of(folder: str | Path) -> ImageModel | str:
    """Return all that the folder says of images, or why its prompts cannot have any. Costs some milliseconds, and the
    reading of tokenizer.json if tokenizer_config.json does not list the tokens."""
    try:
        return _read(_Folder(folder))
    except _NoForm as reason:
        return str(reason)
    except (ConfigError, OSError) as error:
        return str(error)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # a value of another type than it always has
        return f"its files say something unexpected of images: {error!r}"


def _read(folder: _Folder) -> ImageModel:
    kind = folder.config.get("model_type")
    if not folder.config.get("vision_config"):
        raise _NoForm("config.json has no vision_config: the model takes text alone")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        reason = NO_FORM.get(kind, "how its prompts have them is not known here") if isinstance(kind, str) else "?"
        raise _NoForm(f"images of the family {kind!r} are not built: {reason}")
    _check_processor(folder, family)
    parts = family.read(folder)
    module = f"transformers.models.{family.module}"
    video, video_spec = _read_video(folder, family)
    spec = ProcessorSpec(str(folder.path), module, family.class_name, family.kind, parts.options, video_spec)
    form = ImageForm(parts.placeholder, parts.written, parts.token_id, _fingerprint(folder, spec), video)
    return ImageModel(form, spec, parts.rows, parts.line_end, parts.end)


def _read_video(folder: _Folder, family: _Family) -> tuple[VideoForm | str, VideoSpec | None]:
    """Return how prompts have videos and what is done with them, or why they have none."""
    if family.video is None:
        return f"the processor of the family {folder.config['model_type']!r} takes images alone", None
    try:
        return family.video(folder)
    except _NoForm as reason:
        return str(reason), None
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError) as error:
        return f"its files say something unexpected of videos: {error!r}", None


def _check_processor(folder: _Folder, family: _Family) -> None:
    """Raise unless the folder's image processor is the family's, as transformers computes it with Pillow."""
    if not folder.image_processor:
        raise _NoForm(f"the folder has no {PREPROCESSOR}")
    named = str(folder.image_processor.get("image_processor_type") or family.class_name)
    base = family.class_name.removesuffix("Pil")
    if named.removesuffix("Fast").removesuffix("Pil") != base:
        raise _NoForm(f"its image processor is {named}; only {base} is built for this family")
    for key, wanted in (("do_resize", True), ("do_center_crop", False)):
        if folder.image_processor.get(key) not in (None, wanted):
            raise _NoForm(f"{key} is {not wanted} in {PREPROCESSOR}, which is not built")
    for package in ("transformers", "pillow"):
        version_of(package)
    package_spec = importlib.util.find_spec("transformers")  # a look for its folder, no import
    places = package_spec.submodule_search_locations if package_spec is not None else None
    file = Path("models", *family.module.split(".")).with_suffix(".py")
    if not any((Path(place) / file).is_file() for place in places or ()):
        raise _NoForm(f"transformers {version_of('transformers')} has no {family.class_name}; install 5.23 or later")


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise _NoForm(f"the package {package} is not installed") from None


def versions() -> str:
    """Return the versions that a fingerprint covers, as words."""
    return f"transformers {version('transformers')}, Pillow {version('pillow')}"


def _fingerprint(folder: _Folder, spec: ProcessorSpec) -> bytes:
    """Return the hash of all that decides the patches of a file: settings, class, back end, versions."""
    settings = json.dumps(folder.image_processor, sort_keys=True)
    name = (spec.class_name, BACK_END, sorted(spec.options.items()), version_of("transformers"), version_of("pillow"))
    return hashlib.blake2b(f"{settings}\n{name}".encode(), digest_size=IMAGE_KEY_BYTES).digest()


def key_of(data: bytes | bytearray, form: ImageForm) -> bytes:
    """Return `ImagePart.key` of an image's file."""
    return image_key(data, form.fingerprint)
