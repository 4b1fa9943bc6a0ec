#!/usr/bin/env bash
# Set-up, then one prefill and one decode instance of a small model on this machine: prints a first completion and
# serves until Ctrl-C. Arguments go to `chitu serve`: --once ends after the completion, --model PATH, --port N, a.b=c.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$here/script/setup.sh"
exec "$here/.venv/bin/chitu" serve --first-completion "$@"
