#!/usr/bin/env bash
# The last step of a build, as root: nothing that is one machine's own stays in the image.
set -euo pipefail

# Nobody logs in by SSH: Session Manager is the way in. (What runs now goes on until the build instance stops.)
systemctl disable ssh.service ssh.socket
rm -f /etc/ssh/ssh_host_*
rm -rf /root/.ssh /home/*/.ssh
rm -f /root/.bash_history /home/*/.bash_history

# The network, the host's name and the users are made anew at the first boot.
cloud-init clean --logs --seed
rm -f /etc/netplan/50-cloud-init.yaml /etc/sudoers.d/90-cloud-init-users
# Empty, not missing: systemd then makes a new one and takes the boot for a first one.
truncate --size=0 /etc/machine-id
rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed
rm -rf /var/lib/dhcp/* /run/systemd/netif/leases/*

apt-get clean
rm -rf /var/lib/apt/lists/* /root/.cache /home/*/.cache /var/log/journal/* /var/tmp/*
find /var/log -type f -exec truncate --size=0 {} +
sync
