#!/usr/bin/env bash
# Set-up, then one prefill and one decode instance of a small model on this machine: prints a first completion and
# serves until Ctrl-C. Arguments go to `chitu serve`: --once ends after the completion, --model PATH, --port N, a.b=c.
# If the default port is taken and no argument names another, any free one is used.
set -euo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$here/script/setup.sh"
if [[ " $*" != *" --port"* && " $*" != *router.port=* ]] && (exec 3<>/dev/tcp/127.0.0.1/21003) 2>/dev/null; then
    echo "quickstart: port 21003 is taken, so this cluster gets a free one (--port N chooses)" >&2
    set -- --port 0 "$@"
fi
exec "$here/.venv/bin/chitu" serve --first-completion "$@"
