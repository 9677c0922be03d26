#!/usr/bin/env bash
# Builds the image of box cpu. Usage: docker/build-cpu.sh [docker|podman]
# Set BASE to an image that is here or can be pulled; without one, Debian is made by debootstrap (needs root).
# Set TAG and CONTEXT (a directory that keeps the wheels between builds) to change their defaults; pip's own variables
# (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, ...) say where the wheels come from.
set -euo pipefail
cd "$(dirname "$0")"
engine=${1:-docker}
BASE=${BASE:-debian:bookworm}
TAG=${TAG:-paro-cpu:0.32.0}
CONTEXT=${CONTEXT:-${XDG_CACHE_HOME:-$HOME/.cache}/paro-orchestrator/image}
PYTHON=${PYTHON:-python3}

if "$engine" image inspect "$TAG" >/dev/null 2>&1; then
    echo "$TAG is there; remove it with '$engine rmi $TAG' to build it again"
    exit
fi

# One image for both engines, where docker has it already.
if [ "$engine" = podman ] && docker image inspect "$TAG" >/dev/null 2>&1; then
    docker save "$TAG" | podman load --quiet
    exit
fi

if ! "$engine" image inspect "$BASE" >/dev/null 2>&1 && ! "$engine" pull --quiet "$BASE"; then
    echo "$BASE cannot be pulled: making it with debootstrap"
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase bookworm "$root" >"$root.log"
    tar -C "$root" -c . | "$engine" import - "$BASE"
fi

mkdir -p "$CONTEXT/wheels"
cp cpu.requirements.txt cpu.Dockerfile "$CONTEXT"
if ! cmp -s cpu.requirements.txt "$CONTEXT/wheels/complete"; then
    rm -f "$CONTEXT"/wheels/*.whl
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 \
        --dest "$CONTEXT/wheels" -r cpu.requirements.txt
    cp cpu.requirements.txt "$CONTEXT/wheels/complete"
fi

DOCKER_BUILDKIT=1 "$engine" build --quiet --network host --build-arg "BASE=$BASE" --tag "$TAG" \
    --file "$CONTEXT/cpu.Dockerfile" "$CONTEXT"
