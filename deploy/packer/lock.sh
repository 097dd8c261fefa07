#!/usr/bin/env bash
# Writes requirements-common.txt, requirements-cpu.txt and requirements-gpu.txt: every package of the images with its
# hashes. Needs uv and the internet; run it after a change of requirements.in or ../../requirements.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly cpu_index=https://download.pytorch.org/whl/cpu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Ubuntu 24.04: Python 3.12, glibc 2.39.
compile() {
  uv pip compile --quiet --no-config --generate-hashes --no-header --no-annotate --python-version 3.12 \
    --python-platform x86_64-manylinux_2_39 "$@"
}

stanzas() { # stanzas FILE PATTERN: the packages whose line begins so, each with its hashes
  awk -v pattern="^($2)" '/^[^ ]/ { wanted = $0 ~ pattern } wanted' "$1"
}

compile requirements.in --output-file "$folder/gpu"
# PyPI's torch for Linux is the one with CUDA; these come with it and with nothing else.
readonly cuda='torch==|triton==|cuda-|nvidia-'
stanzas "$folder/gpu" '[a-z]' | awk -v pattern="^($cuda)" '/^[^ ]/ { wanted = $0 !~ pattern } wanted' >"$folder/common"
version=$(sed -n 's/^torch==\([^ ]*\) .*/\1/p' "$folder/gpu")
wheel="torch-$version+cpu-cp312-cp312-manylinux_2_28_x86_64.whl"
hash=$(curl --fail --silent --show-error "$cpu_index/torch/" | sed -n "s/.*${wheel/+/%2B}#\(sha256\)=\([0-9a-f]*\).*/\1:\2/p" | head -1)
[ -n "$hash" ] || { echo "lock.sh: $cpu_index has no $wheel" >&2; exit 1; }

{ echo "# Both images. Made by lock.sh."; cat "$folder/common"; } >requirements-common.txt
{
  echo "# The gpu image. Made by lock.sh."
  echo "-r requirements-common.txt"
  stanzas "$folder/gpu" "$cuda"
} >requirements-gpu.txt
{
  echo "# The cpu image: torch without the 3 GB of CUDA. Made by lock.sh."
  echo "-r requirements-common.txt"
  echo "--extra-index-url $cpu_index"
  printf 'torch==%s+cpu \\\n    --hash=%s\n' "$version" "$hash"
} >requirements-cpu.txt
