"""`python -m deploy cost`: every number again by hand, from the table."""

import json
import re

import pytest

from deploy import cluster
from tests.deploy.terraform import copy_of
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("commands for EC2")

PRICES = json.loads((ROOT / "deploy" / "prices.json").read_text())
INSTANCES = PRICES["instances"]


def columns(text, name):
    """The three numbers of a row: on demand, planned at least, planned at most."""
    row = next(line for line in text.splitlines() if line.startswith(name))
    found = re.search(r" (\d+\.\d\d)   (\d+\.\d\d)(?: to (\d+\.\d\d))?(?: \*)?$", row)
    return tuple(float(number) for number in (found[1], found[2], found[3] or found[2]))


def on_demand(name):
    return INSTANCES[name]["on_demand"][0]


def test_rows_and_sums_are_those_of_the_table(cost):
    hosts = {"replay_instance_type": "r7i.4xlarge", "learner_instance_types": ["g6.2xlarge"], "max_hours": 10}
    disks = {"replay_volume_gib": 100, "learner_volume_gib": 200}
    actors = {"actor_instance_types": ["c7i.8xlarge", "m7a.8xlarge"], "actor_hosts": 7, "actor_on_demand_hosts": 2}
    result = cost("--frames-per-second", "20000", **hosts, **disks, **actors)
    assert (result.returncode, result.stderr) == (0, "")
    each, spots = on_demand("c7i.8xlarge"), [INSTANCES[name]["spot"] for name in actors["actor_instance_types"]]
    low = 2 * each + 5 * min(spot[0] for spot in spots)
    high = 2 * each + 5 * max(spot[1] for spot in spots)
    volumes = (100 + 200 + 8 * 16) * PRICES["gp3_gib_month"][0] / 730 + 125 * PRICES["gp3_mbps_month"][0] / 730
    fixed = on_demand("r7i.4xlarge") + on_demand("g6.2xlarge") + volumes + 9 * PRICES["public_ipv4_hour"][0]
    total = (fixed + 7 * each, fixed + low, fixed + high)
    hours = 200e6 / 20000 / 3600
    for name, wanted in (
        ("actors: 7 x c7i.8xlarge", (7 * each, low, high)),
        ("volumes: 428 GiB", (volumes,) * 3),
        ("an hour", total),
        ("until the time limit of 10 h", [10 * number for number in total]),
        ("200M frames", [hours * number for number in total]),
    ):
        assert columns(result.stdout, name) == pytest.approx(wanted, abs=0.01), name
    assert "5 of 7 actor hosts on spot" in result.stdout


def test_a_learner_of_another_type_than_the_first_has_another_price(cost):
    """The first one is meant, and the range is that of all. Each host has its price, its disk and its address."""
    types = ("g6.4xlarge", "g6.8xlarge", "g6.xlarge")
    first, dear, cheap = map(on_demand, types)
    for hosts, gibibytes in ((1, 412), (2, 612)):
        text = cost(learner_instance_types=types, learner_hosts=hosts).stdout
        row = f"learner: {hosts} x g6.4xlarge (or g6.8xlarge, g6.xlarge)"
        assert columns(text, row) == pytest.approx((hosts * first, hosts * cheap, hosts * dear), abs=0.005)
        assert f"volumes: {gibibytes} GiB" in text and f"addresses: {7 + hosts} public IPv4" in text
    text = cost(learner_instance_types=["g6.12xlarge"], learner_gpus=4).stdout
    assert columns(text, "learner: 1 x g6.12xlarge") == (4.60, 4.60, 4.60)


def test_what_the_table_does_not_know_is_told(cost):
    text = cost(region="eu-west-1", learner_instance_types=["g6.2xlarge"]).stdout
    assert "eu-west-1 is not in the table" in text and PRICES["compiled"] in text and "* from memory" in text
    assert re.search(r"^learner: .*\*$", text, re.MULTILINE)
    text = cost(learner_instance_types=["g6.4xlarge"]).stdout
    assert re.search(r"^learner: .*\d$", text, re.MULTILINE)
    assert "200M frames at" not in text and "--frames-per-second, as measured" in text
    for kind, name in (("on_demand", "c7q.8xlarge"), ("spot", "r7i.4xlarge")):
        result = cost(actor_instance_types=[name])
        assert result.returncode == 2 and f"no {kind} price of {name}" in result.stderr
    assert cost(actor_instance_types=["r7i.4xlarge"], actor_on_demand_hosts=6).returncode == 0


def test_the_table_names_its_sources_and_agrees_with_ec2_on_sizes(aws):
    found = aws.client("ec2").describe_instance_types(InstanceTypes=sorted(INSTANCES))["InstanceTypes"]
    sizes = {entry["InstanceType"]: entry["VCpuInfo"]["DefaultVCpus"] for entry in found}
    for name, entry in INSTANCES.items():
        assert entry["vcpus"] == sizes[name], name
        for kind in entry.keys() - {"vcpus"}:
            *numbers, source = entry[kind]
            assert source in PRICES["sources"] and numbers == sorted(numbers) and numbers[0] > 0, name
        if "spot" in entry:
            assert entry["spot"][1] <= entry["on_demand"][0], name


def test_what_terraform_refuses_has_no_price(cost, monkeypatch):
    """All of it in one line; Terraform's tests have each variable."""
    wrong = {"actor_hosts": 201, "max_hours": 0, "learner_gpus": 3, "name": "releases"}
    told = ["from 0 to 200. (var.actor_hosts is 201)", "max_hours has to be ", "learner_gpus has to be 1, 2, 4 or 8"]
    result = cost(**wrong)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert all(finding in result.stderr for finding in [*told, "name must not be releases"]), result.stderr
    monkeypatch.setenv("PATH", "/bin-of-nobody")
    result = cost()
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "terraform reads the variables, and is not installed: https://" in result.stderr


def test_later_places_of_variables_win(cost, monkeypatch, tmp_path):
    """As Terraform reads them: defaults, the environment, terraform.tfvars, *.auto.tfvars, named files, flags."""
    directory = copy_of(ROOT / "deploy" / "terraform" / "cluster", tmp_path / "cluster")
    monkeypatch.setattr(cluster, "CONFIGURATION", directory)
    named = tmp_path / "named.tfvars"
    given = []
    for hosts, add in (
        (6, lambda: None),
        (11, lambda: monkeypatch.setenv("TF_VAR_actor_hosts", "11")),
        (12, lambda: (directory / "terraform.tfvars").write_text("actor_hosts = 12\n")),
        (13, lambda: (directory / "a.auto.tfvars").write_text("actor_hosts = 13\n")),
        (14, lambda: (directory / "b.auto.tfvars.json").write_text('{"actor_hosts": 14}')),
        (15, lambda: (named.write_text("actor_hosts = 15\n"), given.extend(("-var-file", str(named))))),
        (16, lambda: given.extend(("-var", "actor_hosts=16"))),
    ):
        add()
        assert f"\nactors: {hosts} x " in cost(*given).stdout


def test_a_learner_tells_how_many_hosts_it_can_use(cost):
    text = cost("--updates-per-second", "550").stdout
    assert "a learner of 550 updates/s of 512 takes 352,000 transitions/s at 0.8 samples an insert" in text
    assert f": {550 * 512 / 0.8 / 32 / 1856:.1f} hosts of c7i.8xlarge make them" in text and "the plan has 6" in text
    small = {"preset": "two-cores", "actor_instance_types": ["c7i.2xlarge"]}
    fewer = small | {"learner_flags": {"batch_size": 32}}
    for given, told in (
        (small, "takes 2,560 transitions/s at 2.5 samples an insert: 0.2 hosts of c7i.2xlarge"),
        (fewer, "updates/s of 32 takes 1,280 transitions/s at 2.5"),
        (fewer | {"replay_flags": {"samples_per_insert": "4"}}, "updates/s of 32 takes 800 transitions/s at 4 s"),
    ):
        assert told in cost("--updates-per-second", "100", **given).stdout
    free = cost("--updates-per-second", "100", replay_flags={"samples_per_insert": "0"})
    assert free.returncode == 2 and "with samples_per_insert 0 nobody waits for the learner" in free.stderr
    refused = cost("--updates-per-second", "100", agent="impala")
    assert refused.returncode == 2 and "agent impala and preset paper takes is not known" in refused.stderr
    for flag in ("--updates-per-second", "--frames-per-second"):
        assert cost(flag, "0").stderr == f"cannot cost: {flag} 0: a positive number is needed\n"
