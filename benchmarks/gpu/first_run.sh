#!/usr/bin/env bash
# The first ten minutes on a GPU: bash benchmarks/gpu/first_run.sh OUT, from the root of a checkout.
# Leaves OUT/gpu.tar.gz, which is rewritten after each program, and ends within 550 s. Wheels of
# what the machine lacks (pydantic and its three) are installed from the folder .whl, if there is one.
set -u
out=${1:?a folder for the archive}
shift
mkdir -p "$out"
export PYTHONUNBUFFERED=1
if ls .whl/*.whl >/dev/null 2>&1; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target /tmp/site .whl/*.whl && export PYTHONPATH=/tmp/site
fi
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu --format=csv
exec python3 -m benchmarks.gpu --out "$(mktemp -d)/gpu" --archive "$out/gpu.tar.gz" --minutes 8.9 "$@"
