#!/usr/bin/env bash
# Starts the agent of Session Manager again until it is connected. One that starts before AWS knows the host's role
# everywhere sleeps for half an hour. A connected agent is left alone: a restart would end the sessions through it.
# User-data of the instances on which Packer builds; a unit on the cluster's hosts. It ends after half an hour.
set -euo pipefail

proxy=${https_proxy:-https:443} # where there is none, AWS itself
is_connected() { ss -Hnpt state established "( dport = :${proxy##*:} )" | grep 'ssm-agent' >/dev/null; }

for _ in $(seq 20); do
  sleep "${SESSION_AGENT_SECONDS:-90}" # longer than the agent keeps a connection that it has no use for
  if is_connected; then
    echo "session_agent.sh: the agent of Session Manager is connected"
    exit 0
  fi
  unit=$(systemctl list-unit-files --plain --no-legend '*amazon-ssm-agent*.service' | awk 'NR == 1 { print $1 }')
  [ -n "$unit" ] || { echo "session_agent.sh: this host has no agent of Session Manager" >&2; exit 0; }
  echo "session_agent.sh: $unit is not connected: restarting it"
  systemctl restart "$unit"
done
echo "session_agent.sh: the agent of Session Manager cannot connect" >&2
