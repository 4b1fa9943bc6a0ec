#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1
# 2P2D on two nodes of Slurm: node 0 runs the router, D0 and D1, node 1 runs P0 and P1.
#
#   srun -N 2 bash script/srun_pd_disagg_2p2d_two_nodes.sh --model PATH [--partition NAME] [--cpus-per-gpu N] [a.b=c ...]
#   sbatch script/srun_pd_disagg_2p2d_two_nodes.sh --model PATH ...
#
# All options: script/srun_pd_disagg.sh. What would run: chitu plan pd_disagg_2p2d_multi_node --hosts NODE0,NODE1
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# sbatch runs a copy of this file from its spool; the project is the folder of the submission.
[ -e "$here/srun_pd_disagg.sh" ] || here=$SLURM_SUBMIT_DIR/script
exec bash "$here/srun_pd_disagg.sh" pd_disagg_2p2d_multi_node "$@"
