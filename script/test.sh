#!/usr/bin/env bash
# Set up for tests, then run them all as CI does: four files at a time, since most tests wait for processes. About 15
# minutes on two cores. Arguments go to pytest instead: script/test.sh test/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
script/setup.sh --dev
if (($# == 0)); then
    printf 'test: all tests, about 15 minutes on two cores (script/test.sh test/unit: two)\n' >&2
    set -- -n 4 --dist loadfile --no-loadscope-reorder --durations=10 --ignore test/rdma
fi
exec .venv/bin/python -m pytest "$@"
