"""The private address by which a learner host is known: that of its rank, whichever instance it is.

A group gives each new instance another address. The one of the rank is added to its network interface.
"""

import logging
import subprocess

import boto3
from apexrl_store import AWS_ERRORS, QUICKLY
from host_environment import HostError, own_address
from host_metadata import Metadata

logger = logging.getLogger("apexrl_host")

MACS = "/latest/meta-data/network/interfaces/macs"
COMMAND_SECONDS = 10.0


def take() -> None:
    """Takes the address over, also from an instance that hangs, and lets Linux answer to it.

    Raises: HostError when AWS does not give it. OSError when the metadata service does not answer.
    """
    address, metadata = own_address(), Metadata()
    mac = (metadata.get("/latest/meta-data/mac") or "").strip()
    interface = (metadata.get(f"{MACS}/{mac}/interface-id") or "").strip()
    if not interface:
        raise HostError("the metadata service names no network interface of this host")
    if address not in (metadata.get(f"{MACS}/{mac}/local-ipv4s") or "").split():
        assign(address, interface)
    # On lo, as systemd-networkd removes from the other interfaces what it does not know. Linux answers there, too.
    subprocess.run(["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True, timeout=COMMAND_SECONDS)
    logger.info("%s is the address of this host, at %s", address, interface)


def assign(address: str, interface: str) -> None:
    """Gives an address to a network interface of this host.

    Raises: HostError when AWS does not.
    """
    try:
        answer = boto3.client("ec2", config=QUICKLY).assign_private_ip_addresses(
            NetworkInterfaceId=interface, PrivateIpAddresses=[address], AllowReassignment=True
        )
    except AWS_ERRORS as error:
        raise HostError(str(error)) from error
    if address not in [entry["PrivateIpAddress"] for entry in answer["AssignedPrivateIpAddresses"]]:
        raise HostError(f"AWS has not given {address} to {interface}")
