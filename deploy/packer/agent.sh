#!/usr/bin/env bash
# Installs the CloudWatch agent, which has no package in Ubuntu. Packer runs it as root with this variable:
#   CLOUDWATCH_AGENT_URL  where the agent is published; empty: the image is to have none
set -euo pipefail

# https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/verify-CloudWatch-Agent-Package-Signature.html
readonly fingerprint=937616F3450B7D806CBD9725D58167303B789C72

if [ -z "$CLOUDWATCH_AGENT_URL" ]; then
  echo "agent.sh: an image without the CloudWatch agent was asked for"
  exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
package=$folder/amazon-cloudwatch-agent.deb
download=(curl --fail --silent --show-error --location --retry 3 --max-time 300)
"${download[@]}" -o "$folder/key" "$CLOUDWATCH_AGENT_URL/assets/amazon-cloudwatch-agent.gpg"
"${download[@]}" -o "$package" "$CLOUDWATCH_AGENT_URL/ubuntu/amd64/latest/amazon-cloudwatch-agent.deb"
"${download[@]}" -o "$package.sig" "$CLOUDWATCH_AGENT_URL/ubuntu/amd64/latest/amazon-cloudwatch-agent.deb.sig"

gpg=(gpg --homedir "$folder" --batch --quiet --no-autostart)
"${gpg[@]}" --import "$folder/key"
"${gpg[@]}" --status-fd 1 --verify "$package.sig" "$package" >"$folder/status" ||
  { echo "agent.sh: the CloudWatch agent is not what its signature says: it is not installed" >&2; exit 1; }
grep -q "^\[GNUPG:\] VALIDSIG .*$fingerprint\$" "$folder/status" ||
  { echo "agent.sh: the CloudWatch agent is not signed by AWS's key $fingerprint: it is not installed" >&2; exit 1; }

dpkg --install "$package"
# apexrl-logs.service starts it, once it is known whose logs they are.
systemctl disable amazon-cloudwatch-agent.service
