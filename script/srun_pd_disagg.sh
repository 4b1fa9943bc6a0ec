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
#   --container IMAGE    run in this image (deploy/Containerfile): by Pyxis if srun has it, else by Apptainer on each node,
#                        whose IMAGE is a .sif file or docker://NAME. It sees the current folder, those of --model and
#                        --log-dir, and PD_CONTAINER_MOUNTS (A:B,C:D). The nodes need no .venv then.
# PYTHON names the interpreter; default: .venv's of this checkout.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case " $* " in *' --container '* | *' --container='*) PYTHON=${PYTHON:-none} ;; esac # that of the image
source "$here/pd_common.sh"

[ $# -gt 0 ] || fail "give a topology, for instance pd_disagg_2p3d_multi_node"
all=("$@") topology=$1
shift
partition="" nodes=2 gpu_topology="" container="" srun_options=() node_arguments=() inside=("$topology") seen=("$PWD")
while [ $# -gt 0 ]; do
    case $1 in
        --gpu-topology=* | --partition=* | --nodes=* | --gpus-per-node=* | --cpus-per-gpu=* | --container=* | --model=* | --log-dir=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in --container) ;; *) inside+=("$1") ;; esac
    case $1 in
        --container) container=${2:-}; shift; shift || fail "--container needs a value" ;;
        --model | --log-dir)
            [ $# -ge 2 ] || fail "$1 needs a value"
            inside+=("$2") node_arguments+=("$1" "$2")
            case $2 in /*) seen+=("$2") ;; esac
            shift 2 ;;
        --partition | --nodes | --gpus-per-node | --cpus-per-gpu)
            [ $# -ge 2 ] || fail "$1 needs a value"
            srun_options+=("$1=$2") inside+=("$2")
            case $1 in
                --partition) partition=$2 ;;
                --nodes) nodes=$2 ;;
                --cpus-per-gpu) node_arguments+=("$1" "$2") ;;
            esac
            shift 2 ;;
        --gpu-topology) gpu_topology=${2:-} inside+=("${2:-}"); shift; shift || fail "--gpu-topology needs a value" ;;
        *) node_arguments+=("$1"); shift ;;
    esac
done

case $topology in /*) seen+=("$(dirname "$topology")") ;; esac
[ -z "$container" ] || unset PYTHON PYTHONPATH # they are not those of the image
mounts=""
for path in "${seen[@]}"; do [[ ,$mounts, == *",$path:$path,"* ]] || mounts+=${mounts:+,}$path:$path; done
mounts+=${PD_CONTAINER_MOUNTS:+,$PD_CONTAINER_MOUNTS}
command=(bash "$here/srun_pd_disagg.sh" "${all[@]}") pyxis=()
if [ -n "$container" ] && srun --help 2>/dev/null | grep -- --container-image >/dev/null; then
    command=(bash "$IMAGE_SCRIPT" "${inside[@]}")
    pyxis=(--container-image="$container" --container-mounts="$mounts" --container-workdir="$PWD")
fi

# No step, or that of a batch script (4294967291, from Slurm 25 or so -5) or of salloc's shell (4294967290, -6).
if ! [[ ${SLURM_STEP_ID:-} =~ ^[0-9]{1,9}$ ]]; then
    command -v srun >/dev/null || fail "there is no srun here; without Slurm: script/start_pd_separation.sh"
    if [ -n "${SLURM_JOB_ID:-}" ]; then nodes=$SLURM_JOB_NUM_NODES srun_options=(); fi
    if [ -z "$container" ]; then make_key "$topology"; else random_key; fi
    # The key and PYTHON reach the nodes even if the job has SLURM_EXPORT_ENV=NONE (sbatch --export=NONE).
    step=(srun "${srun_options[@]}" --export=ALL --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1
        "${pyxis[@]}" "${command[@]}")
    [ "${SLURM_TASK_PID:-}" = $$ ] || exec "${step[@]}"
    # Slurm also signals the batch script (scancel, a time limit, --signal=B:TERM@60). On SIGTERM srun would kill its tasks.
    trap 'scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || :' TERM
    "${step[@]}" &
    while wait $!; kill -0 $! 2>/dev/null; do :; done
    code=0; wait $! || code=$? # the signal may have ended the last one
    exit "$code"
fi

if [ -n "$container" ]; then # this node's task, outside of the image
    ((${#pyxis[@]} == 0)) || fail "this step has no container any more: give srun --container-image=$container"
    runtime=$(command -v apptainer || command -v singularity) || fail "there is neither Pyxis (srun --container-image) nor apptainer"
    options=(--bind "$mounts" --pwd "$PWD")
    [ ! -e /dev/nvidiactl ] || options+=(--nv)
    exec "$runtime" exec "${options[@]}" "$container" bash "$IMAGE_SCRIPT" "${inside[@]}"
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
