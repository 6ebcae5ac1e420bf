#!/usr/bin/env bash
# What a machine with a GPU is asked, in at most 8 minutes and without a network. Statuses: 0 all right, 1 something fell
# short, 2 there is no GPU or the checks cannot run. `--rehearse` runs the same steps on the CPU; `--help` says the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
command -v "$python" > /dev/null || { echo "gpu_check: $python is not on PATH: set PYTHON to one that has jax" >&2; exit 2; }
exec "$python" scripts/gpu_check.py "$@"
