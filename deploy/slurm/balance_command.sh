#!/usr/bin/env bash
# For `dp_config.router.balance_command`: submits one job for each instance that is wanted and neither there nor
# submitted. Arguments: ROLE WANTED PRESENT.
#
#   CHITU_URL      the router's address for the jobs (needed)
#   CHITU_FIXED_prefill, CHITU_FIXED_decode, CHITU_FIXED_unified
#                  instances of the role that are no jobs of this script (0)
#   CHITU_SBATCH   options for sbatch, such as "--gpus 1 --time 12:00:00"
#
# If fewer are wanted it cancels jobs that have not begun. Those that run are drained by hand (`chitu drain D3`), since
# the longest answer decides how long that takes.
set -euo pipefail
role=$1 wanted=$2
name=chitu-$role
fixed=CHITU_FIXED_$role
jobs=$(squeue --me --noheader --name "$name" --states PENDING,CONFIGURING,RUNNING --format %i | wc -l)
missing=$((wanted - ${!fixed:-0} - jobs))
chitu=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/chitu
for ((n = 0; n < missing; n++)); do
    # shellcheck disable=SC2086
    sbatch --job-name "$name" ${CHITU_SBATCH:-} --wrap "exec '$chitu' join $role --url '$CHITU_URL'"
done
if ((missing < 0)); then
    squeue --me --noheader --name "$name" --states PENDING --format %i | head -n $((-missing)) | xargs -r scancel
fi
