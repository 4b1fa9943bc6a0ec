#!/usr/bin/env bash
# All checks of a GPU within ten minutes: whether it computes what it should (1P1D against transformers, the kernels, the
# engine), then `chitu bench gpu`, then clusters. Needs no network and no installation, only the libraries below (as in
# `pip download` for this Python, unpacked into one folder on PYTHONPATH):
#   torch, triton, numpy, safetensors, tokenizers, transformers, and
#   msgspec, pyzmq, fastapi, starlette, pydantic, pydantic-core, annotated-types, typing-inspection, uvicorn, uvloop,
#   httptools, jinja2, pyyaml, rich, httpx, prometheus-client, llguidance, opentelemetry-api (newer FastAPIs import it),
#   typing-extensions, certifi, pytest, pytest-timeout, hypothesis
#   and, for the rows of their transports, mooncake-transfer-engine-cuda13 and nixl-cu13
# Each part has its own limit; a line is printed as it ends, and OUT (default: gpu-check) has a log of each and
# check.json, written after each part. The last line says RIGHT, WRONG or UNKNOWN.
# Usage: script/gpu_check.sh [OUT] [--minutes 10] [--parts truth,kernels]
# Without a GPU, or with CHITU_GPU_TWIN=1, the same runs on a CPU with small sizes.
set -euo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/../test/gpu/check_card.py" "$@"
