#!/usr/bin/env bash
# Run a topology on several machines without Slurm: by ssh from here, or by hand on each machine.
#
#   script/start_pd_separation.sh --hosts A,B --ssh --model PATH [--topology FILE] [a.b=c ...]
#   script/start_pd_separation.sh --hosts A,B --node-index K --model PATH ...     on A with K=0, on B with K=1
#
# The hosts replace those of the topology (default pd_disagg_1p1d_multi_node), the router's first. With --ssh this
# checkout must be at the same path on every machine; when the processes of one machine end, or on Ctrl-C, those of all
# machines are ended. A machine that is silent for 20 s counts as ended. PD_SSH is the ssh command, such as `ssh -tt -p 2222`
# (without -tt the nodes outlive the script); PYTHON is the interpreter. Other options are those of `chitu node`. With
# --ssh all machines get the cluster key of CHITU_CLUSTER_KEY, of the topology, or a new one.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/pd_common.sh"

topology=pd_disagg_1p1d_multi_node names="" index="" by_ssh="" arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --topology=* | --hosts=* | --node-index=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
        --topology | --hosts | --node-index)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case $1 in --topology) topology=$2 ;; --hosts) names=$2 ;; --node-index) index=$2 ;; esac
            shift 2 ;;
        --ssh) by_ssh=1; shift ;;
        *) arguments+=("$1"); shift ;;
    esac
done
[ -n "$names" ] || fail "give the machines: --hosts A,B"
[ -n "$by_ssh$index" ] || fail "give --ssh, or on each machine --node-index 0, 1, ..."
IFS=, read -ra machines <<<"$names"
# The node looks up its own name; the others may not be there yet.
[ -n "$by_ssh" ] || run_node "$topology" "$names" "$index" "${arguments[@]}"
addresses=$(addresses_of "${machines[@]}")

# ------------------------------------------------------------------------------------------------------------ by ssh
# TERM: what each machine would redraw on its terminal of -tt, the others' lines would break, or end up in a file.
command=(env TERM=dumb PYTHON="$PYTHON" bash "$here/start_pd_separation.sh" --topology "$topology" --hosts "$addresses" "${arguments[@]}")
children=() interrupted="" ending="" code=0
end_all() { ending=1; kill -TERM "${children[@]}" 2>/dev/null || true; }
make_key "$topology"
trap 'interrupted=1; end_all' TERM HUP
trap '[ -n "$ending" ] || code=130; interrupted=1; end_all' INT
ssh="ssh -o ConnectTimeout=10 -o ServerAliveInterval=5"
login_s=120 # for a login whose shell hangs; as long as sshd waits for a password
# The node's script, which has the key, goes by stdin into a file that only its user reads and that removes itself: no
# command line, local or remote, shows the key. The login shell may be fish or tcsh.
keep='IFS= read -r node && umask 077 && file=$(mktemp) && printf %s "$node" >"$file" && echo "$file"' # a line, as on a terminal no end comes
for index in "${!machines[@]}"; do
    node="rm -f \"\$0\"; export CHITU_CLUSTER_KEY=$(printf %q "$CHITU_CLUSTER_KEY"); cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}" --node-index "$index")"
    file=$(timeout --foreground "$login_s" ${PD_SSH:-$ssh} "${machines[index]}" "exec bash -c '$keep'" <<<"$node" | tail -n 1 | tr -d '\r') || file=""
    [ -n "$file$ending" ] || { say "${machines[index]} did not take the cluster key"; code=2; end_all; }
    [ -z "$ending" ] || break
    # ssh ends on the signal; the remote terminal of -tt then sends SIGHUP to the node's processes.
    ${PD_SSH:-$ssh -tt} "${machines[index]}" "exec bash $file" </dev/null &
    children+=($!)
done
left=${#children[@]}
while [ "$left" -gt 0 ]; do # the first end ends all, and its exit code is the script's
    interrupted="" status=0
    wait -n || status=$?
    [ -n "$interrupted" ] || left=$((left - 1))
    [ -n "$ending" ] || code=$status
    end_all
done
exit "$code"
