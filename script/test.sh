#!/usr/bin/env bash
# Set up for tests, then run them all as CI does: two files at a time for each core, since most tests wait for processes.
# Arguments go to pytest instead: script/test.sh test/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
core_minutes=34 # what CI computes of them
script/setup.sh --dev
if (($# == 0)); then
    cores=$(nproc) workers=$((2 * (cores < 8 ? cores : 8)))
    printf 'test: all tests with %d workers, about %d minutes on %d cores (script/test.sh test/unit: %d); dots show the share that is done\n' \
        "$workers" "$((core_minutes * 2 / workers + 2))" "$cores" "$((4 * 2 / workers + 1))" >&2
    set -- -n "$workers" --dist loadfile --no-loadscope-reorder --durations=10 --ignore test/rdma
fi
exec .venv/bin/python -m pytest "$@"
