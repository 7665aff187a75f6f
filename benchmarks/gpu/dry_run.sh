#!/usr/bin/env bash
# What first_run.sh can do without a GPU, with the packages of a lent machine: `make gpu-dry`. Runs in
# a copy of the tree as it would travel there. PYTHON is of an environment without Ray and pydantic,
# whose wheels are in the folder WHEELS.
set -euo pipefail
python=$(realpath -s "${1:?PYTHON WHEELS OUT}") wheels=$(realpath "$2") out=$(mkdir -p "$3" && realpath "$3")
most_mib=50
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
git ls-files -coz --exclude-standard | tar -c --null --files-from - | tar -x -C "$place"
bytes=$(du -sb "$place" | cut -f 1)
echo "The tree has $((bytes >> 20)) MiB; at most $most_mib MiB travel."
((bytes < most_mib << 20))
cp -r "$wheels" "$place/.whl"
cd "$place"
export PATH="$(dirname "$python"):$PATH" XDG_CACHE_HOME="$place/cache"
bash benchmarks/gpu/first_run.sh "$out" --rehearse
python3 -m benchmarks.gpu.compile_kernels --out "$out/compiled.json"
tar -tzf "$out/gpu.tar.gz" | grep -F gpu/check_engine_cpu.json
