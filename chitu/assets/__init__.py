"""What the package ships beside code: the embedded model `chitu-tiny`, made by `script/train_tiny.py`."""

from __future__ import annotations

from pathlib import Path

TINY_MODEL_NAME = "chitu-tiny"
TINY_MODEL_DIR = Path(__file__).parent / TINY_MODEL_NAME
