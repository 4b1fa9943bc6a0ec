"""Placeholders and rows of images, family by family, against the image processors of `transformers`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.image_models import IMAGE_FAMILIES, write_image_model

from chitu.config.schema import ImagesConfig
from chitu.errors import InvalidRequest
from chitu.images.child import HIDDEN
from chitu.images.forms import form_of, image_model_of, key_of
from chitu.images.layout import ImageForm, ImageLayout, Run
from chitu.images.sizer import SizerProcess

pytestmark = pytest.mark.engine

ODD = random.Random(5)
SIZES = [(ODD.randrange(1, 400), ODD.randrange(1, 300)) for _ in range(100)] + [(3, 700), (900, 4), (2000, 1500)]
NUM_TOKENS = {"internvl": 4}
MERGED = {"qwen2_5_vl": 2, "qwen3_vl": 2, "glm4v_moe": 2}
LINE = {"mistral3": 28, "llava": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_image_model(root / family, family) for family in IMAGE_FAMILIES}


@pytest.fixture(scope="module")
def real(folders: dict[str, Path]) -> dict[str, list[dict[str, Any] | None]]:
    """Return what the processors make of images of `SIZES`."""
    wanted = json.dumps({str(folder): SIZES for folder in folders.values()})
    paths = os.pathsep.join(["test", *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "support.image_grids"],
        input=wanted,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "TRANSFORMERS_VERBOSITY": "error"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {family: found[str(folder)] for family, folder in folders.items()}


@pytest.fixture
def sizer(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[SizerProcess]:
    found = SizerProcess.of(folders[getattr(request, "param", "qwen3_vl")], ImagesConfig())
    assert isinstance(found, SizerProcess)
    yield found
    found.close()


def _expected(family: str, made: dict[str, Any]) -> ImageLayout:
    """Return the layout that the outputs of the family's processor ask for."""
    match family:
        case "gemma3":
            assert made["shape"] == [1, 3, 112, 112]
            return ImageLayout((Run(502, 64),))
        case "internvl":
            assert made["shape"][0] == made["num_patches"]
            return ImageLayout((Run(502, 4 * made["num_patches"]),))
        case "mistral3" | "llava":
            height, width = (edge // LINE[family] for edge in made["image_sizes"])
            runs = [Run(500, width), Run(501, 1, is_image=False)] * height
            return ImageLayout((*runs[:-1], Run(502, 1, is_image=False)))
        case _:
            times, height, width = made["image_grid_thw"]
            assert times * height * width == made["shape"][0]
            grid = times, height // 2, width // 2
            return ImageLayout((Run(502, times * grid[1] * grid[2]),), grid)


@pytest.mark.parametrize("sizer", IMAGE_FAMILIES, indirect=True)
def test_rows_and_grids_are_those_of_the_processor(
    sizer: SizerProcess, real: dict[str, list[dict[str, Any] | None]], request: pytest.FixtureRequest
) -> None:
    family = request.node.callspec.params["sizer"]
    for size, made in zip(SIZES, real[family], strict=True):
        if made is None:
            with pytest.raises(InvalidRequest, match="refuses an image of this size") as refused:
                sizer.layout([(40, 40), size])
            assert refused.value.param == "1"
        else:
            [layout] = sizer.layout([size])
            assert layout == _expected(family, made), size
            assert layout.num_rows == sum(run.count for run in layout.runs if run.is_image)
    refused_sizes = [size for size, made in zip(SIZES, real[family], strict=True) if made is None]
    assert ((3, 700) in refused_sizes) == (family in MERGED)


def test_a_dead_sizer_is_replaced_and_needs_no_torch(sizer: SizerProcess) -> None:
    [layout] = sizer.layout([(30, 40)])
    first = sizer.pid
    assert first is not None
    with open(f"/proc/{first}/maps", encoding="utf-8") as file:
        assert not [line for line in file if any(f"/{name}/" in line for name in HIDDEN)]
    os.kill(first, signal.SIGKILL)
    assert sizer.layout([(30, 40)]) == [layout]  # known
    assert sizer.pid == first
    assert sizer.layout([(301, 40)])[0].num_rows > 0
    assert sizer.pid not in (None, first)


def test_forms_of_the_families(folders: dict[str, Path]) -> None:
    found = {family: form_of(folder) for family, folder in folders.items()}
    texts = {family: form[:3] for family, form in found.items() if isinstance(form, ImageForm)}
    assert texts == {
        "qwen2_5_vl": ("<|image_pad|>", "<|image_pad|>", 502),
        "qwen3_vl": ("<|image_pad|>", "<|image_pad|>", 502),
        "glm4v_moe": ("<|image|>", "<|image|>", 502),
        "gemma3": (
            "<start_of_image>",
            "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
            502,
        ),
        "mistral3": ("[IMG]", "[IMG]", 500),
        "llava": ("[IMG]", "[IMG]", 500),
        "internvl": ("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>", 502),
    }


def test_forms_import_no_transformers(folders: dict[str, Path]) -> None:
    code = (
        "import sys; from chitu.images.forms import form_of; form_of(sys.argv[1]); "
        "print([name for name in ('transformers', 'torch', 'PIL', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(folders["gemma3"])], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_the_fingerprint_covers_all_that_makes_patches(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = [form_of(folders["qwen3_vl"]), form_of(write_image_model(tmp_path / "a", "qwen3_vl", image_std=[0.4] * 3))]
    forms.append(form_of(write_image_model(tmp_path / "b", "qwen2_5_vl")))
    for package in ("transformers", "pillow"):
        monkeypatch.setattr(
            "chitu.images.forms.version", lambda name, package=package: "99.0" if name == package else "5.23.0"
        )
        forms.append(form_of(folders["qwen3_vl"]))
    fingerprints = {form.fingerprint for form in forms if isinstance(form, ImageForm)}
    assert len(fingerprints) == len(forms) and {len(each) for each in fingerprints} == {16}
    keys = {key_of(b"file", form) for form in forms if isinstance(form, ImageForm)}
    assert len(keys) == len(forms)


@pytest.mark.parametrize(
    ("family", "file", "change", "words"),
    [
        ("qwen3_vl", "config.json", {"vision_config": None}, "text alone"),
        (
            "qwen3_vl",
            "config.json",
            {"model_type": "llama4"},
            "'llama4' are not built: its image processor in .* needs",
        ),
        ("qwen3_vl", "config.json", {"model_type": "somewhat"}, "'somewhat' are not built"),
        ("qwen3_vl", "config.json", {"image_token_id": 9}, "no added token 9, which is image_token_id"),
        ("qwen3_vl", "preprocessor_config.json", {"image_processor_type": "Other"}, "is Other; only Qwen2VL"),
        ("qwen3_vl", "preprocessor_config.json", {"do_resize": False}, "do_resize is False"),
        ("qwen3_vl", "tokenizer.json", {"added_tokens": 7}, "something unexpected"),
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", "config.json", {"boi_token_index": None}, "no boi_token_index"),
        ("mistral3", "processor_config.json", {"patch_size": 16}, "are not those of config.json"),
        ("mistral3", "tokenizer.json", {"added_tokens": []}, r"no token '\[IMG\]'"),
        ("llava", "config.json", {"vision_config": {"model_type": "clip_vision_model"}}, "tower 'clip_vision_model'"),
    ],
)
def test_why_there_is_no_form(tmp_path: Path, family: str, file: str, change: dict[str, Any], words: str) -> None:
    folder = write_image_model(tmp_path, family)
    changed = json.loads((folder / file).read_text()) | change
    (folder / file).write_text(json.dumps(changed))
    found = form_of(folder)
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found)


def test_settings_within_the_processors_file(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers 5 writes one file for all parts of a processor."""
    folder = write_image_model(tmp_path, "mistral3")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in str(form_of(folder))
    whole = json.loads((folder / "processor_config.json").read_text()) | {"image_processor": settings}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert form_of(folder) == form_of(folders["mistral3"])
    assert not isinstance(image_model_of(folder), str)
