#!/usr/bin/env bash
# Run all of what CI runs some of: the cases that are marked by_hand, a thousand fresh draws of each property, RDMA
# between two emulated machines. Takes hours. At the end each failure, with the command that repeats it.
# Arguments: test files or folders (all). NIGHTLY_SEED=N draws as a run did that printed N.
set -euo pipefail
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CHITU_NIGHTLY=1
seed=${NIGHTLY_SEED:-$((RANDOM * 32768 + RANDOM))}
script/setup.sh --dev
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v buildah >/dev/null; then # for the image
    apt-get -qq install -y --no-install-recommends buildah debootstrap crun >/dev/null || printf 'nightly: no buildah, so no image\n'
fi
printf 'nightly: %s, seed %s\n' "$(git rev-parse --short HEAD)" "$seed"
failures=$(mktemp)
trap 'rm -f "$failures"' EXIT

run() { # pytest with these arguments; what fails goes to the list
    local failed=.pytest_cache/v/cache/lastfailed
    rm -f "$failed"
    .venv/bin/python -m pytest --by-hand --hypothesis-seed="$seed" -o cache_dir=.pytest_cache "$@" && return
    (($? != 5)) || return 0 # no test in it
    { grep '": true' "$failed" || printf '"%s": true\n' "$*"; } >>"$failures"
}
if (($#)); then
    run "$@"
else
    run -n 4 --dist loadfile --no-loadscope-reorder --ignore test/rdma
    run test/rdma
fi
if [ -s "$failures" ]; then
    printf '\nnightly: what failed, and how to repeat it:\n'
    sed -E "s|^ *\"(.*)\": true,?\$|CHITU_NIGHTLY=1 .venv/bin/python -m pytest --by-hand --hypothesis-seed=$seed '\1'|" "$failures"
    exit 1
fi
printf '\nnightly: all passed\n'
