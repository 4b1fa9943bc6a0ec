#!/usr/bin/env bash
# Set up for tests, then run all of them, two files at a time. Arguments go to pytest: script/test.sh test/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
script/setup.sh --dev
if (($# == 0)); then set -- -n 2 --dist loadfile --no-loadscope-reorder; fi
exec .venv/bin/python -m pytest "$@"
