#!/usr/bin/env bash
# Builds a dataset on a cluster, as job arrays whose tasks read and encode side by side; the result is that of one machine:
#
#   bash slurm/data.sh configs/data/tiny.yaml [a.b=c ...] [--tasks N] [--cluster NAME] [cluster.key=value ...]
#       on a login node: checks the config and that the input is there, freezes it in OUTPUT.work/slurm, submits
#
# The same as `mlite data build CONFIG --slurm`.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${MLITE_PYTHON:-}" ]; then
  MLITE_PYTHON=python3
  if [ -x "$checkout/.venv/bin/python" ]; then MLITE_PYTHON=$checkout/.venv/bin/python; fi
fi
exec "$MLITE_PYTHON" -m launcher.cli data build --slurm "$@"
