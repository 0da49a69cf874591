#!/usr/bin/env bash
# For a machine that has torch and transformers but no network: downloads what else the check needs into .wheels/, from where
# run.sh installs it into a folder of its own. Carry .wheels/ there with the checkout (11 MB).
#   tests/gpu/wheels.sh [PYTHON_VERSION]       that machine's, 3.12 by default; x86-64 Linux
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
version=${1:-3.12}
python=.venv/bin/python
[ -x "$python" ] || python=python3
pinned() { for name in "$@"; do grep -iE "^${name//-/[-_]}==" constraints.txt; done; }
rm -rf .wheels
mapfile -t wheels < <(pinned annotated-types hjson omegaconf pydantic pydantic-core typing-inspection zstandard)
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp "${platforms[@]}" -d .wheels "${wheels[@]}"
DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w .wheels "$(pinned deepspeed)" # published as source alone
du -sh .wheels
