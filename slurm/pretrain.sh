#!/usr/bin/env bash
# Trains on a cluster, requeued until the run is done:
#
#   bash slurm/pretrain.sh configs/run/tiny.yaml [section.key=value ...] [cluster=NAME] [cluster.nodes=2 ...]
#       on a login node: checks everything, freezes the config in the run's folder, submits with configs/cluster/NAME.yaml
#   sbatch --nodes 2 --ntasks-per-node 8 slurm/pretrain.sh configs/run/tiny.yaml [section.key=value ...]
#       the same with sbatch's own options; of the cluster's words only container, setup and srun_args
#
#SBATCH --job-name=megatron-lite
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# A signal that comes before python runs is remembered, not fatal.
trap 'export MLITE_STOPPED_EARLY=1' USR1 TERM

# sbatch runs a copy of this file in Slurm's own folder: there, what was submitted from is SLURM_SUBMIT_DIR. In a shell of salloc's it is
# this very file, in whatever folder one has gone to since.
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -e "$checkout/launcher/slurm/job.py" ]; then
  checkout=$SLURM_SUBMIT_DIR
  cd "$checkout"
fi

# What the login node left for this job, in files: where SBATCH_EXPORT is NONE, a job has nothing of its environment.
if [ "${1:-}" = --submission ]; then
  if [ -e "$2/python" ]; then MLITE_PYTHON=$(cat "$2/python"); fi
  if [ -e "$2/setup.sh" ]; then
    set +u
    . "$2/setup.sh"
    set -u
  fi
fi
if [ -z "${MLITE_PYTHON:-}" ]; then
  MLITE_PYTHON=python3
  if [ -x "$checkout/.venv/bin/python" ]; then MLITE_PYTHON=$checkout/.venv/bin/python; fi
fi
set -- "$MLITE_PYTHON" -m launcher.slurm.job "$@"
if [ -z "${SLURM_JOB_ID:-}" ]; then exec "$@"; fi

# While python loads, signals are held back: blocked, they wait over exec until the job listens. The first python has no site to load.
trap '' USR1 TERM
hold='import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM]); os.execvp(sys.argv[1], sys.argv[1:])'
exec "$MLITE_PYTHON" -S -c "$hold" "$@"
