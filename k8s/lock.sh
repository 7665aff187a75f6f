#!/bin/sh
# Rewrites k8s/requirements.lock: every package of the image, with the hashes of its files on PyPI.
# It needs uv (pip install uv) and the network; it fetches only names and hashes, no packages.
#   k8s/lock.sh                 the newest versions that pyproject.toml and the pins below allow
#   k8s/lock.sh --keep          the locked versions, where they still fit
set -eu
cd "$(dirname "$0")"
pins=$(mktemp)
new=$(mktemp)
trap 'rm -f "$pins" "$new"' EXIT
# What the manifests and the tests are written for. PyPI's torch for Linux comes with CUDA.
printf 'ray[serve]==2.60.0\ntorch==2.13.0\n' > "$pins"
if [ "${1:-}" = "--keep" ]; then cp requirements.lock "$new"; fi
# The machine's own settings for pip and uv must not apply.
uv pip compile ../pyproject.toml --extra images "$pins" --output-file "$new" --no-config \
    --default-index https://pypi.org/simple --python-version 3.12 \
    --python-platform x86_64-manylinux_2_28 --only-binary :all: --generate-hashes --no-annotate --no-header --quiet
cp "$new" requirements.lock
