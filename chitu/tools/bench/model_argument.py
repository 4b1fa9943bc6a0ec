"""`--model` of the benchmarks: all that `chitu serve --model` takes."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from chitu.errors import ChituError
from chitu.launch.model_source import find_model

MODEL_HELP = "checkpoint folder, GGUF file, Hugging Face id, or a name such as smollm2"


def model_folder(word: str) -> Path:
    """Return the folder of a model, which is downloaded if need be. For argparse's `type`: ArgumentTypeError, with the
    reason, if there is none."""
    try:
        return Path(find_model(word, True, functools.partial(print, file=sys.stderr, flush=True)).path)
    except ChituError as error:
        raise argparse.ArgumentTypeError(error.message) from error
