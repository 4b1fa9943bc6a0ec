#!/usr/bin/env bash
# All checks of a GPU in two halves of ten minutes: whether it computes what it should (1P1D against transformers, the
# kernels, the engine), then `chitu bench gpu`, then clusters. Needs no network and no installation, only the libraries
# of script/gpu_wheels.sh on PYTHONPATH, and what machines with GPUs have: torch, triton, numpy, safetensors, tokenizers,
# transformers, uvloop, jinja2, pyyaml, rich, httpx, prometheus-client, certifi, pytest, pytest-timeout and hypothesis.
# Each part has its own limit; a line is printed as it ends, and OUT (default: gpu-check) has a log of each and
# check.json, written after each part; OUT.tar.xz has all of it. The last line says RIGHT, WRONG or UNKNOWN.
# Usage: script/gpu_check.sh [OUT] [--minutes 10] [--parts first | second | truth,kernels]
# Without a GPU, or with CHITU_GPU_TWIN=1, the same runs on a CPU with small sizes.
set -euo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/../test/gpu/check_card.py" "$@"
