#!/usr/bin/env bash
# Run a topology on the nodes of a Slurm job, one task per node. srun_pd_disagg_*_two_nodes.sh call this with their file.
#
#   srun -N 2 bash script/srun_pd_disagg.sh TOPOLOGY.yaml --model PATH [options] [a.b=c ...]
#   with sbatch, with salloc, or without a job the script starts this srun itself
#
# Node k of the job is host k of the topology, the router's first. Options:
#   --model PATH         checkpoint folder, at the same path on every node
#   --gpu-topology TOPOLOGY.yaml   instead of TOPOLOGY.yaml on nodes that have GPUs for the job
#   --partition NAME     of Slurm; has an effect only if the script starts srun
#   --nodes N            the same (default 2)
#   --gpus-per-node N    the same
#   --cpus-per-gpu N     the same; also the CPU threads of each rank of an instance
#   --ready-timeout S    seconds until ready (600);  --log-dir DIR
# PYTHON names the interpreter; default: .venv's of this checkout.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/pd_common.sh"

[ $# -gt 0 ] || fail "give a topology, for instance pd_disagg_2p3d_multi_node"
all=("$@") topology=$1
shift
partition="" nodes=2 gpu_topology="" srun_options=() node_arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --gpu-topology=* | --partition=* | --nodes=* | --gpus-per-node=* | --cpus-per-gpu=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
        --partition | --nodes | --gpus-per-node | --cpus-per-gpu)
            [ $# -ge 2 ] || fail "$1 needs a value"
            srun_options+=("$1=$2")
            case $1 in
                --partition) partition=$2 ;;
                --nodes) nodes=$2 ;;
                --cpus-per-gpu) node_arguments+=("$1" "$2") ;;
            esac
            shift 2 ;;
        --gpu-topology) gpu_topology=${2:-}; shift; shift || fail "--gpu-topology needs a value" ;;
        *) node_arguments+=("$1"); shift ;;
    esac
done

# No step, or that of a batch script (4294967291, from Slurm 25 or so -5) or of salloc's shell (4294967290, -6).
if ! [[ ${SLURM_STEP_ID:-} =~ ^[0-9]{1,9}$ ]]; then
    command -v srun >/dev/null || fail "there is no srun here; without Slurm: script/start_pd_separation.sh"
    if [ -n "${SLURM_JOB_ID:-}" ]; then nodes=$SLURM_JOB_NUM_NODES srun_options=(); fi
    make_key "$topology"
    # The key and PYTHON reach the nodes even if the job has SLURM_EXPORT_ENV=NONE (sbatch --export=NONE).
    step=(srun "${srun_options[@]}" --export=ALL --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1
        bash "$here/srun_pd_disagg.sh" "${all[@]}")
    [ "${SLURM_TASK_PID:-}" = $$ ] || exec "${step[@]}"
    # Slurm also signals the batch script (scancel, a time limit, --signal=B:TERM@60). On SIGTERM srun would kill its tasks.
    trap 'scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || :' TERM
    "${step[@]}" &
    while wait $!; kill -0 $! 2>/dev/null; do :; done
    code=0; wait $! || code=$? # the signal may have ended the last one
    exit "$code"
fi

[ "${SLURM_STEP_NUM_TASKS:-}" = "${SLURM_STEP_NUM_NODES:-}" ] ||
    fail "this step has $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes: srun with --ntasks-per-node=1"
[ -z "$partition" ] || [ "$partition" = "${SLURM_JOB_PARTITION:-$partition}" ] ||
    say "--partition $partition comes too late: the job runs in $SLURM_JOB_PARTITION (srun -p $partition ...)"

list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-$SLURM_NODELIST}}
names=$(scontrol show hostnames "$list" 2>/dev/null) || names=$("$PYTHON" -m chitu.launch.slurm "$list")
if [ -n "$gpu_topology" ] && "$PYTHON" -m chitu.process.node_devices >/dev/null; then topology=$gpu_topology; fi
run_node "$topology" "$(addresses_of $names)" "$SLURM_NODEID" "${node_arguments[@]}" \
    --on-failure "scancel --signal=TERM $SLURM_JOB_ID.$SLURM_STEP_ID"
