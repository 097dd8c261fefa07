#!/usr/bin/env bash
# Gets the programs that `bash run.sh test --all` needs, as far as they can be had here. A test whose tool is missing is
# skipped, and says so.
#
#   bash run.sh test --version      # makes .venv
#   bash tests/deploy/install.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Programs of this machine and their Debian packages. gpg cannot make a key without its agent.
declare -A packages=(
  [packer]=packer [cloud-init]=cloud-init [shellcheck]=shellcheck [debootstrap]=debootstrap [git]=git
  [systemd-nspawn]=systemd-container [ip]=iproute2 [gpg]=gpg [gpg-agent]=gpg-agent
  [munged]=munge [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client
)

missing=()
for tool in "${!packages[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${packages[$tool]}")
done

if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 apt-get update -qq || echo "install.sh: apt-get update failed" >&2
  for package in "${missing[@]}"; do # one by one: not every release has all
    timeout 300 apt-get install -y -qq --no-install-recommends "$package" >/dev/null \
      || echo "install.sh: $package cannot be installed here; its tests are skipped" >&2
  done
elif [ ${#missing[@]} -gt 0 ]; then
  echo "install.sh: missing: ${missing[*]} (as root on Debian or Ubuntu: apt-get install ${missing[*]})" >&2
fi

.venv/bin/python -m tests.deploy.tools

# Its requirements are at odds with ours: an environment of its own.
if ! { [ -x .venv/checkov/bin/checkov ] || .venv/bin/python -m venv .venv/checkov; } \
  || ! .venv/checkov/bin/python -m pip install --quiet --disable-pip-version-check \
    --requirement tests/deploy/requirements-checkov.txt; then
  rm -rf .venv/checkov
  echo "install.sh: checkov cannot be installed here; its tests are skipped" >&2
fi
