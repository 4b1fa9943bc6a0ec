#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1
# 2P3D on two nodes of Slurm: node 0 runs the router and D0 to D2, node 1 runs P0 and P1. If the nodes have GPUs for the
# job, each instance takes two: (0,1), (2,3), (4,5) and (0,1), (2,3). With fewer GPUs, one for each instance:
# script/srun_pd_disagg.sh pd_disagg_2p3d_multi_node
#
#   srun -N 2 bash script/srun_pd_disagg_2p3d_two_nodes.sh --model PATH [--partition NAME] [--cpus-per-gpu N] [a.b=c ...]
#   sbatch script/srun_pd_disagg_2p3d_two_nodes.sh --model PATH ...
#
# All options: script/srun_pd_disagg.sh. What would run: chitu plan pd_disagg_2p3d_multi_node --hosts NODE0,NODE1
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# sbatch runs a copy of this file from its spool; the project is the folder of the submission.
[ -e "$here/srun_pd_disagg.sh" ] || here=$SLURM_SUBMIT_DIR/script
exec bash "$here/srun_pd_disagg.sh" pd_disagg_2p3d_multi_node --gpu-topology pd_disagg_2p3d_gpu "$@"
