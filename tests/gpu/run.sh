#!/usr/bin/env bash
# Checks every GPU path against the CPU and measures speed beside peers, in under ten minutes on one H200: README.md here.
#   tests/gpu/run.sh [--device cuda|cpu] [--tiny] [--out DIR] [--limit-s S] [--only GROUP ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
missing='import importlib.util as u, sys; sys.exit(all(map(u.find_spec, ("pydantic", "omegaconf", "zstandard", "deepspeed"))))'
if "$python" -c "$missing" && compgen -G '.wheels/*.whl' >/dev/null; then # what the machine lacks was carried here: wheels.sh
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .wheels/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
"$python" -m tests.gpu.check "$@"
