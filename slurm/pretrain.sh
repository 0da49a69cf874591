#!/usr/bin/env bash
# Trains on a cluster, requeued until the run is done:
#
#   bash slurm/pretrain.sh configs/run/tiny.yaml [section.key=value ...] [cluster=NAME] [cluster.nodes=2 ...]
#       on a login node: checks everything, freezes the config in the run's folder, submits with configs/cluster/NAME.yaml
#   sbatch --nodes 2 --ntasks-per-node 8 slurm/pretrain.sh configs/run/tiny.yaml [section.key=value ...]
#       the same with sbatch's own options
#
#SBATCH --job-name=megatron-lite
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# A signal before python listens is remembered, not fatal.
trap 'export MLITE_STOPPED_EARLY=1' USR1 TERM

# Inside a job, $0 is Slurm's own copy of this file: what was submitted from is SLURM_SUBMIT_DIR.
if [ -n "${SLURM_JOB_ID:-}" ]; then
  checkout=$SLURM_SUBMIT_DIR
  cd "$SLURM_SUBMIT_DIR"
else
  checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fi

if [ -n "${MLITE_SETUP:-}" ]; then
  set +u
  . "$MLITE_SETUP"
  set -u
fi
if [ -z "${MLITE_PYTHON:-}" ]; then
  MLITE_PYTHON=python3
  if [ -x "$checkout/.venv/bin/python" ]; then MLITE_PYTHON=$checkout/.venv/bin/python; fi
fi
trap '' USR1
exec "$MLITE_PYTHON" -m launcher.slurm.job "$@"
