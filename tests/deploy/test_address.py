"""A learner host takes the private address of its rank, whichever instance it is. test_cluster.py does it with moto."""

import urllib.error

import pytest

from tests.deploy.imds import metadata_service
from tests.system.processes import ROOT

OWN, ADDRESS = "10.79.0.30", "10.79.0.11"


@pytest.fixture
def host(monkeypatch):
    """The module, on a host whose AWS gives the addresses in `host.given`; what it asks is in `host.asked`."""
    monkeypatch.syspath_prepend(ROOT / "deploy" / "files")
    import apexrl_store

    asked, given = [], [ADDRESS]

    class Ec2:
        def assign_private_ip_addresses(self, **words):
            asked.append(words)
            return {"AssignedPrivateIpAddresses": [{"PrivateIpAddress": address} for address in given]}

    monkeypatch.setenv("APEXRL_ADDRESS", ADDRESS)
    monkeypatch.setattr(apexrl_store, "asked", asked, raising=False)
    monkeypatch.setattr(apexrl_store, "given", given, raising=False)
    monkeypatch.setattr(apexrl_store.boto3, "client", lambda *_, **__: Ec2())
    monkeypatch.setattr(apexrl_store.subprocess, "run", lambda words, **_: asked.append(words))
    with metadata_service() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
        known = "/latest/meta-data/network/interfaces/macs/02:ab"
        service.facts |= {"/latest/meta-data/mac": "02:ab", f"{known}/interface-id": "eni-1"}
        service.facts[f"{known}/local-ipv4s"] = OWN
        monkeypatch.setattr(apexrl_store, "facts", service.facts, raising=False)
        yield apexrl_store


def test_a_host_takes_its_address_also_from_a_host_that_hangs_and_once(host):
    host.address()
    wanted = {"NetworkInterfaceId": "eni-1", "PrivateIpAddresses": [ADDRESS], "AllowReassignment": True}
    answer = ["ip", "address", "replace", f"{ADDRESS}/32", "dev", "lo"]
    assert host.asked == [wanted, answer]
    host.facts[next(path for path in host.facts if path.endswith("local-ipv4s"))] = f"{OWN}\n{ADDRESS}"
    host.address()
    assert host.asked == [wanted, answer, answer], "one that has it asks AWS nothing"


def test_without_its_address_a_host_does_not_answer_to_it(host, monkeypatch):
    """The unit tries again."""
    host.given[:] = ["10.79.0.99"]
    with pytest.raises(host.HostError, match=f"AWS has not given {ADDRESS} to eni-1"):
        host.address()
    host.facts.clear()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        host.address()
    monkeypatch.setenv("APEXRL_ADDRESS", "ten")
    with pytest.raises(host.HostError, match=r"APEXRL_ADDRESS='ten' in /etc/apexrl/role.env"):
        host.address()
    assert not any(isinstance(words, list) for words in host.asked)
