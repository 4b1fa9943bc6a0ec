"""Measurements that developers run from a checkout: `.venv/bin/python -m benchmark.router`. Doubles: `test/support`."""

import os
import sys
from pathlib import Path

DOUBLES = str(Path(__file__).parents[1] / "test")
sys.path.append(DOUBLES)
os.environ["PYTHONPATH"] = os.pathsep.join([DOUBLES, *filter(None, [os.environ.get("PYTHONPATH")])])
