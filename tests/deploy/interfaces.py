"""Network interfaces of hosts, as EC2 has them: in moto, and in what the metadata service tells."""

from typing import NamedTuple

from tests.deploy.moto_process import Aws


class Interface(NamedTuple):
    """A network interface with its first address; `facts` are what its host's metadata service knows, by path."""

    name: str
    facts: dict[str, str]


def make_subnet(aws: Aws, cidr: str) -> str:
    """Makes a network that is one subnet; returns the subnet."""
    ec2 = aws.client("ec2")
    network = ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
    return ec2.create_subnet(VpcId=network, CidrBlock=cidr)["Subnet"]["SubnetId"]


def make_interface(aws: Aws, subnet: str, address: str) -> Interface:
    """Makes the network interface of a new host."""
    made = aws.client("ec2").create_network_interface(SubnetId=subnet, PrivateIpAddress=address)["NetworkInterface"]
    name, mac = made["NetworkInterfaceId"], made["MacAddress"]
    known = f"/latest/meta-data/network/interfaces/macs/{mac}"
    facts = {"/latest/meta-data/mac": mac, f"{known}/interface-id": name, f"{known}/local-ipv4s": address}
    return Interface(name, facts)


def addresses_of(aws: Aws, interface: str) -> list[str]:
    """Returns the private addresses of an interface, the first one first."""
    [found] = aws.client("ec2").describe_network_interfaces(NetworkInterfaceIds=[interface])["NetworkInterfaces"]
    return [entry["PrivateIpAddress"] for entry in found["PrivateIpAddresses"]]
