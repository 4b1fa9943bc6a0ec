# Code shared by srun_pd_disagg.sh and start_pd_separation.sh; sourced by them, with `here` set to the folder script/.
root="$(dirname "$here")"
say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
fail() { say "$*"; exit 2; }
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$root/.venv/bin/python
    [ -x "$PYTHON" ] || { PYTHON=$(command -v python3) && "$PYTHON" -c 'import msgspec' 2>/dev/null; } ||
        fail "there is no $root/.venv, and no python3 with the packages of chitu: script/setup.sh"
fi
export PYTHON PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

addresses_of() { # NAME...: their addresses, separated by commas
    "$PYTHON" -m chitu.launch.addresses "$@"
}

make_key() { # TOPOLOGY: a cluster key for all nodes that inherit this environment, unless it or the topology has one
    local key code="import sys; from chitu.config.cluster_key import cluster_key_of, with_own_key
from chitu.config.load import load_topology; from chitu.errors import ConfigError
try: print(cluster_key_of(with_own_key(load_topology(sys.argv[1]))))
except ConfigError as error: print(f'chitu: {error.message}', file=sys.stderr); sys.exit(2)"
    trap 'exit 130' INT # and no traceback of Python
    key=${CHITU_CLUSTER_KEY:-$(trap '' INT; "$PYTHON" -c "$code" "$1")} || exit 2
    trap - INT
    export CHITU_CLUSTER_KEY=$key
}

IMAGE_SCRIPT=/opt/chitu/script/srun_pd_disagg.sh # of deploy/Containerfile

random_key() { # a cluster key for all nodes, unless the environment has one; a topology's is overridden
    export CHITU_CLUSTER_KEY=${CHITU_CLUSTER_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
}

run_node() { # TOPOLOGY MACHINE,... INDEX [argument...]: this node's processes, in place of the script
    [ -n "$2" ] || exit 2
    case ${2%%,*} in *[!0-9.]*) ;; *) export PD_MASTER_ADDR=${2%%,*} ;; esac # a name is another address on its own machine
    exec "$PYTHON" -m chitu.cli node "$1" --hosts "$2" --node-index "$3" "${@:4}"
}
