"""A learner host takes the private address of its rank, whichever instance it is."""

import os

import pytest

from tests.deploy.hosts import ADDRESS
from tests.deploy.imds import metadata_service
from tests.deploy.interfaces import addresses_of, make_interface, make_subnet
from tests.system.processes import ROOT

OWN = "10.79.0.30"


@pytest.fixture
def metadata(aws):
    """The metadata service of a new host, whose interface is in moto."""
    with metadata_service() as service:
        service.interface = make_interface(aws, make_subnet(aws, "10.79.0.0/20"), OWN)
        service.facts |= service.interface.facts
        yield service


@pytest.fixture
def take(finish, metadata, tmp_path):
    """Runs the command; returns its status, what it said, and what it asked Linux."""
    notes, program = tmp_path / "asked", tmp_path / "bin" / "ip"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >>{notes}\n')
    program.chmod(0o755)
    host = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint, "PATH": f"{program.parent}:{os.environ['PATH']}"}

    def run(**environment):
        status, text = finish("address", **host, **{"APEXRL_ADDRESS": ADDRESS} | environment)
        return status, text, notes.read_text() if notes.exists() else ""

    return run


def test_a_host_takes_its_address_once(take, metadata, aws):
    """One that has it, as the metadata service says, asks AWS nothing."""
    [path] = [path for path in metadata.facts if path.endswith("local-ipv4s")]
    for own, wanted in ((f"{OWN}\n{ADDRESS}", [OWN]), (OWN, [OWN, ADDRESS])):
        metadata.facts[path] = own
        status, text, asked = take()
        assert status == 0 and f"{ADDRESS} is the address of this host" in text, text
        assert asked.splitlines()[-1] == f"address replace {ADDRESS}/32 dev lo"
        assert addresses_of(aws, metadata.interface.name) == wanted


def test_without_its_address_a_host_does_not_answer_to_it(take, metadata):
    """The unit tries again."""
    facts = dict(metadata.facts)
    for path in facts:
        if path.endswith("interface-id"):
            metadata.facts[path] = "eni-00000000"
    status, text, asked = take()
    assert (status, asked) == (1, "") and "eni-00000000" in text and text.count("\n") == 1, text
    metadata.facts = {}
    status, text, asked = take()
    assert (status, asked) == (1, "") and "address: HTTP Error 404" in text, text
    status, text, asked = take(APEXRL_ADDRESS="ten")
    assert (status, asked) == (1, "") and "APEXRL_ADDRESS='ten' in /etc/apexrl/role.env" in text, text


def test_the_address_is_taken_from_a_host_that_hangs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "deploy" / "files")
    import apexrl_store

    asked, given = [], [ADDRESS]

    class Ec2:
        def assign_private_ip_addresses(self, **words):
            asked.append(words)
            return {"AssignedPrivateIpAddresses": [{"PrivateIpAddress": address} for address in given]}

    monkeypatch.setattr(apexrl_store.boto3, "client", lambda *_, **__: Ec2())
    apexrl_store.assign(ADDRESS, "eni-1")
    expected = {"NetworkInterfaceId": "eni-1", "PrivateIpAddresses": [ADDRESS], "AllowReassignment": True}
    assert asked == [expected]
    given[:] = ["10.79.0.99"]
    with pytest.raises(apexrl_store.HostError, match=f"AWS has not given {ADDRESS} to eni-1"):
        apexrl_store.assign(ADDRESS, "eni-1")
