#!/usr/bin/env bash
# Fetch the libraries that a machine with a GPU may lack, for one without network: wheels of the versions that the tests
# run with, for Linux on x86-64. There, before script/gpu_check.sh:
#   python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE
# Usage: script/gpu_wheels.sh [FOLDER] [PYTHON]   (default: gpu-wheels 3.12)
# MOONCAKE=1 and NIXL=1 add the libraries of their transports, some 50 MiB each.
set -euo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
folder=${1:-gpu-wheels} python=${2:-3.12}
pinned=$(dirname "${BASH_SOURCE[0]}")/../requirements/constraints.txt
wanted=(msgspec pyzmq fastapi starlette pydantic pydantic_core annotated-types uvicorn httptools opentelemetry-api
    typing-inspection typing-extensions llguidance)
[ -z "${MOONCAKE:-}" ] || wanted+=(mooncake-transfer-engine-cuda13)
[ -z "${NIXL:-}" ] || wanted+=(nixl-cu13)
platforms=(--platform any --platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for glibc in 17 24 26 27 28 31 34 35 38 39; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
    "${platforms[@]}" --constraint <(grep -E '^[A-Za-z0-9_.-]+==' "$pinned") --dest "$folder" "${wanted[@]}"
printf '%s wheels in %s\n' "$(find "$folder" -name '*.whl' | wc -l)" "$folder"
