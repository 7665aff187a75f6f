#!/usr/bin/env bash
# The first ten minutes on a GPU: bash benchmarks/gpu/first_run.sh OUT, from the root of a checkout.
# The next ten, on the same machine: bash benchmarks/gpu/first_run.sh OUT --from engine.
# Leaves OUT/gpu.tar.gz, which is rewritten after each program, and ends within 550 s. Wheels of
# what the machine lacks (pydantic and its three) are installed from the folder .whl, if there is one.
set -u
out=${1:-}
if [[ -z $out || $out == -* ]]; then
    echo "usage: bash benchmarks/gpu/first_run.sh OUT [options of python -m benchmarks.gpu]" >&2
    exit 2
fi
shift
results=${XDG_CACHE_HOME:-$HOME/.cache}/diffray/gpu
mkdir -p "$out" "$results"
export PYTHONUNBUFFERED=1
if ls .whl/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" .whl/*.whl && export PYTHONPATH=$site
fi
if ! python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
    echo "python3 has no torch; activate the environment with a CUDA build of it first." >&2
    exit 2
fi
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu --format=csv
fi
exec python3 -m benchmarks.gpu --out "$results" --archive "$out/gpu.tar.gz" --minutes 8.9 "$@"
