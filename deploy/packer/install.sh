#!/usr/bin/env bash
# Makes an image of a fresh Ubuntu 24.04. Packer runs it as root with these variables:
#   APEXRL_VERSION  git tag or commit of the release
#   APEXRL_IMAGE    cpu or gpu: which torch is installed
#   APEXRL_RELEASE  tar file of the release (release.sh)
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

readonly home=/opt/apexrl
readonly lock=$home/deploy/packer/requirements-$APEXRL_IMAGE.txt

readonly oldest_driver=580 # of NVIDIA: the first for CUDA 13, which torch brings

check_driver() {
  # The base image is the newest one and torch is pinned: they may drift apart. This needs no GPU.
  [ "$APEXRL_IMAGE" = gpu ] || return 0
  local driver
  driver=$(modinfo --field version nvidia) || { echo "install.sh: the base image has no NVIDIA driver" >&2; exit 1; }
  [ "${driver%%.*}" -ge "$oldest_driver" ] || {
    echo "install.sh: NVIDIA's driver is $driver, torch needs $oldest_driver or newer: take a newer base image" >&2
    exit 1
  }
}

install_packages() {
  # A host lives for days at most and is replaced by one of a newer image. Upgrades at work would restart its services,
  # and a new kernel would leave the NVIDIA driver behind. Session Manager's agent is a snap: its refresh would cut off
  # the connection of this build.
  systemctl mask apt-daily.timer apt-daily-upgrade.timer
  if command -v snap >/dev/null; then snap refresh --hold; fi
  # DPkg::Lock::Timeout does not cover the lock of the lists, which Ubuntu's own update may hold at the first boot.
  for attempt in $(seq 30); do
    apt-get -o Acquire::Retries=3 update -q && break
    [ "$attempt" -lt 30 ] || { echo "install.sh: the lists of packages cannot be fetched" >&2; exit 1; }
    sleep 10
  done
  apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -q -y --no-install-recommends \
    ca-certificates curl gpg logrotate python3-venv rsyslog
}

install_release() {
  # A fixed number: the journal's volume outlives the image. Others are given from 100 upwards and from 999 downwards.
  id apexrl >/dev/null 2>&1 || useradd --system --uid 650 --user-group --home-dir /var/lib/apexrl --shell /usr/sbin/nologin apexrl
  install -d -m 0755 "$home" /etc/apexrl
  install -d -m 0750 -o apexrl -g apexrl /var/lib/apexrl
  tar --extract --no-same-owner --file="$APEXRL_RELEASE" --directory="$home"
  rm "$APEXRL_RELEASE"
  echo "$APEXRL_VERSION" >"$home/VERSION"
  [ -f "$lock" ] || { echo "install.sh: no image is called $APEXRL_IMAGE: $lock is missing" >&2; exit 1; }
  python3 -m venv "$home/.venv"
  # --no-deps: what the lock does not name is not installed; `pip check` says whether it names everything.
  "$home/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
    --require-hashes --only-binary :all: --requirement "$lock"
  "$home/.venv/bin/python" -m pip check
  # The hosts may not write here, so what Python compiles has to be there already.
  "$home/.venv/bin/python" -m compileall -q "$home/apexrl" "$home"/*.py "$home/deploy/files"
  "$home/.venv/bin/python" -c 'import ale_py, boto3, cv2, gymnasium, tensorboard, torch, zmq; assert zmq.has("curve")'
  "$home/.venv/bin/python" "$home/replay.py" --help >/dev/null
}

install_units() {
  install -m 0644 -t /etc/systemd/system "$home"/deploy/files/systemd/*.{mount,service,target,timer}
  cp -r "$home"/deploy/files/systemd/apexrl-.service.d /etc/systemd/system/
  ln -sfn apexrl-.service.d /etc/systemd/system/apexrl-@.service.d # systemd looks there for apexrl-NAME@INSTANCE.service
  install -m 0644 "$home/deploy/files/rsyslog.conf" /etc/rsyslog.d/10-apexrl.conf
  install -m 0644 "$home/deploy/files/logrotate.conf" /etc/logrotate.d/apexrl
  install -D -m 0644 "$home/deploy/files/logrotate-hourly.conf" /etc/systemd/system/logrotate.timer.d/apexrl.conf
  systemctl enable apexrl.target
}

check_driver
install_packages
install_release
install_units
