#!/usr/bin/env bash
# Set-up, then all tests. Arguments go to pytest: script/test.sh test/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
script/setup.sh
exec .venv/bin/python -m pytest "$@"
