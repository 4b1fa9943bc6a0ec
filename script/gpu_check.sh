#!/usr/bin/env bash
# All checks that need a GPU: test/gpu, then `chitu bench gpu`, each under a time limit. Needs no network and no
# installation, only the libraries below (as in `pip download` for this Python, unpacked into one folder on PYTHONPATH):
#   torch, triton, numpy, safetensors, tokenizers, transformers, and
#   msgspec, pyzmq, fastapi, starlette, pydantic, pydantic-core, annotated-types, typing-inspection, uvicorn, uvloop,
#   httptools, jinja2, pyyaml, rich, httpx, prometheus-client, opentelemetry-api (newer FastAPIs import it),
#   typing-extensions, pytest, pytest-timeout, hypothesis
#   and, for the rows of their transports, mooncake-transfer-engine-cuda13 and nixl-cu13
#   and, for FlashInfer's, flashinfer-python and apache-tvm-ffi; kernels that are not built yet (100 s on 10 cores) are
#   built during the first tests, which needs nvcc and ninja
# Everything ends within MINUTES (10). The tests may take half; the benchmark, whose rows are printed as they come,
# gets the rest. So a job limited to ten minutes can run all: MINUTES=9.5 script/gpu_check.sh
# Usage: script/gpu_check.sh [OUT]      (default: gpu-check; logs and the JSON of the benchmark)
# On a machine without a GPU: CHITU_GPU_TWIN=1 script/gpu_check.sh runs the same on a CPU with small sizes.
set -uo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SECONDS=0
OUT=${1:-gpu-check}
LIMIT=$(awk "BEGIN { print int(${MINUTES:-10} * 60) }")
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
bench=(--json-dir "$OUT")
[ "${CHITU_GPU_TWIN:-}" = 1 ] && bench+=(--device cpu --tiny)

status=0
if ! "$PYTHON" -c 'import chitu.serve.api_server, chitu.serve.scheduler, chitu.tools.bench.gpu.__main__, pytest, hypothesis' 2>"$OUT/imports.log"; then
    echo "gpu_check: a library is missing: $(tail -n 1 "$OUT/imports.log")" >&2
    exit 1
fi
"$PYTHON" -m chitu.cli doctor 2>&1 | tee "$OUT/doctor.log" || true
if [ "${CHITU_GPU_TWIN:-}" != 1 ] && "$PYTHON" -c 'import flashinfer' 2>/dev/null; then
    timeout $((LIMIT / 2)) "$PYTHON" -m chitu.ops.flashinfer_prefill bfloat16 128 >"$OUT/flashinfer.log" 2>&1 &
fi
timeout -k 5 $((LIMIT / 2)) "$PYTHON" -m pytest test/gpu -q --durations=10 2>&1 | tee "$OUT/test.log" || status=1
left=$((LIMIT - SECONDS - 15))
minutes=$(awk "BEGIN { print $left / 60 }")
timeout -k 5 $left "$PYTHON" -m chitu.tools.bench.gpu --minutes "$minutes" "${bench[@]}" 2>&1 | tee "$OUT/bench.log" || status=1
exit $status
