#!/usr/bin/env python3
"""A training beside the instances that serve its model: `trainer.py BASE`, the folder of the checkpoint that serves.

Each round makes other numbers (here noise: put your optimizer there), publishes them, and has the cluster change.
Needs chitu, torch and safetensors. The token is that of `chitu token`, in CHITU_TOKEN.
"""

import argparse
import json
import os
import time
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from safetensors.torch import load_file

from chitu.tools.publish import Publisher

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("base", type=Path)
parser.add_argument("--url", default="http://127.0.0.1:21003")
parser.add_argument("--folder", default="/dev/shm/chitu-policy")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--noise", type=float, default=1e-3)
options = parser.parse_args()


def serve(path: str) -> dict[str, object]:
    """Have all instances change to these weights. Running requests end with those that they began with."""
    headers = {"Authorization": f"Bearer {os.environ['CHITU_TOKEN']}", "Content-Type": "application/json"}
    body = json.dumps({"path": path}).encode()
    with urlopen(Request(f"{options.url}/admin/weights", body, headers)) as reply:
        state: dict[str, object] = json.load(reply)
    return state


publisher = Publisher(options.folder, like=options.base)
loaded: dict[str, torch.Tensor] = {}
for file in sorted(options.base.glob("*.safetensors")):
    loaded |= load_file(file)
parameters = publisher.allocate(loaded)
for name, tensor in loaded.items():
    parameters[name].copy_(tensor)
for number in range(1, options.rounds + 1):
    for parameter in parameters.values():
        parameter += options.noise * torch.randn(parameter.shape).to(parameter.dtype)
    begin_s = time.monotonic()
    path = publisher.publish(parameters)
    published_s = time.monotonic()
    state = serve(path)
    took_s = published_s - begin_s, time.monotonic() - published_s
    print(f"round {number}: published in {took_s[0]:.2f} s, serves {took_s[1]:.2f} s later: {state['model_hash']}")
# `publisher.close()` removes the memory: change to a checkpoint first, for instances that start again.
