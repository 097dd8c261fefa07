"""`python -m deploy cost`: every number again by hand, from the table."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest

from tests.deploy.needed import with_terraform
from tests.deploy.terraform import copy_of
from tests.deploy.test_preflight import as_variable
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("commands for EC2")

PRICES = json.loads((ROOT / "deploy" / "prices.json").read_text())
SMALL = {
    "replay_instance_type": "r7i.4xlarge",
    "learner_instance_types": ["g6.2xlarge"],
    "replay_volume_gib": 100,
    "learner_volume_gib": 200,
    "max_hours": 10,
}


def tell(directory, *words, environment=None, **variables):
    """Runs the command with variables, in a copy of deploy/."""
    given = [word for name, value in variables.items() for word in ("-var", f"{name}={as_variable(value)}")]
    return subprocess.run(
        [sys.executable, "-m", "deploy", "cost", *words, *given],
        cwd=directory.parent,
        env=os.environ | with_terraform() | (environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="session")
def cost(deploy):
    """The command where no cluster is described; a plan's variables by name."""
    return functools.partial(tell, deploy)


def columns(text, name):
    """The three numbers of a row: on demand, planned at least, planned at most."""
    row = next(line for line in text.splitlines() if line.startswith(name))
    found = re.search(r" (\d+\.\d\d)   (\d+\.\d\d)(?: to (\d+\.\d\d))?(?: \*)?$", row)
    return tuple(float(number) for number in (found[1], found[2], found[3] or found[2]))


def test_rows_and_sums_are_those_of_the_table(cost):
    actors = {"actor_instance_types": ["c7i.8xlarge", "m7a.8xlarge"], "actor_hosts": 7, "actor_on_demand_hosts": 2}
    result = cost("--frames-per-second", "20000", **SMALL | actors)
    assert (result.returncode, result.stderr) == (0, "")
    prices = PRICES["instances"]
    first, second = prices["c7i.8xlarge"], prices["m7a.8xlarge"]
    on_demand = first["on_demand"][0]
    low = 2 * on_demand + 5 * min(first["spot"][0], second["spot"][0])
    high = 2 * on_demand + 5 * max(first["spot"][1], second["spot"][1])
    assert columns(result.stdout, "actors: 7 x c7i.8xlarge") == pytest.approx((7 * on_demand, low, high), abs=0.005)
    disks = (100 + 200 + 8 * 16) * PRICES["gp3_gib_month"][0] / 730 + 125 * PRICES["gp3_mbps_month"][0] / 730
    assert columns(result.stdout, "volumes: 428 GiB") == pytest.approx((disks,) * 3, abs=0.005)
    fixed = prices["r7i.4xlarge"]["on_demand"][0] + prices["g6.2xlarge"]["on_demand"][0]
    fixed += disks + 9 * PRICES["public_ipv4_hour"][0]
    total = (fixed + 7 * on_demand, fixed + low, fixed + high)
    assert columns(result.stdout, "an hour") == pytest.approx(total, abs=0.005)
    assert columns(result.stdout, "until the time limit of 10 h") == pytest.approx(
        [10 * each for each in total], abs=0.01
    )
    hours = 200e6 / 20000 / 3600
    assert columns(result.stdout, "200M frames") == pytest.approx([hours * each for each in total], abs=0.01)
    assert "5 of 7 actor hosts on spot" in result.stdout


def test_without_a_measured_rate_there_is_no_price_of_frames(cost):
    result = cost()
    assert result.returncode == 0
    assert "200M frames at" not in result.stdout and "--frames-per-second, as measured" in result.stdout
    assert cost("--frames-per-second", "0").returncode == 2


def test_what_was_not_looked_up_is_marked(cost):
    text = cost(learner_instance_types=["g6.2xlarge"]).stdout
    assert PRICES["compiled"] in text and "* from memory" in text
    assert re.search(r"^learner: .*\*$", text, re.MULTILINE)
    assert re.search(r"^learner: .*\d$", cost(learner_instance_types=["g6.4xlarge"]).stdout, re.MULTILINE)


def test_a_learner_of_another_type_than_the_first_has_another_price(cost):
    """The first one is meant, and the range is that of all."""
    types = ("g6.4xlarge", "g6.8xlarge", "g6.xlarge")
    first, dear, cheap = (2 * PRICES["instances"][name]["on_demand"][0] for name in types)
    text = cost(learner_instance_types=types, learner_hosts=2).stdout
    row = "learner: 2 x g6.4xlarge (or g6.8xlarge, g6.xlarge)"
    assert columns(text, row) == pytest.approx((first, cheap, dear), abs=0.005)


def test_another_region_and_unknown_types_are_told(cost):
    assert "eu-west-1 is not in the table" in cost(region="eu-west-1").stdout
    result = cost(actor_instance_types=["c7q.8xlarge"])
    assert result.returncode == 2 and "no on_demand price of c7q.8xlarge" in result.stderr
    result = cost(actor_instance_types=["r7i.4xlarge"])
    assert result.returncode == 2 and "no spot price of r7i.4xlarge" in result.stderr
    assert cost(actor_instance_types=["r7i.4xlarge"], actor_on_demand_hosts=6).returncode == 0


def test_the_table_names_its_sources_and_agrees_with_ec2_on_sizes(aws):
    names = sorted(PRICES["instances"])
    found = aws.client("ec2").describe_instance_types(InstanceTypes=names)["InstanceTypes"]
    sizes = {entry["InstanceType"]: entry["VCpuInfo"]["DefaultVCpus"] for entry in found}
    for name, entry in PRICES["instances"].items():
        assert entry["vcpus"] == sizes[name], name
        for kind in entry.keys() - {"vcpus"}:
            *numbers, source = entry[kind]
            assert source in PRICES["sources"] and numbers == sorted(numbers) and numbers[0] > 0, name
        if "spot" in entry:
            assert entry["spot"][1] <= entry["on_demand"][0], name


def test_what_terraform_refuses_has_no_price(cost):
    """All of it in one line; Terraform's tests have each variable."""
    result = cost(actor_hosts=201, max_hours=0, learner_gpus=3, name="releases")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    for finding in (
        "actor_hosts has to be a whole number of hosts from 0 to 200. (var.actor_hosts is 201)",
        "max_hours has to be ",
        "learner_gpus has to be 1, 2, 4 or 8",
        "name must not be releases",
    ):
        assert finding in result.stderr, result.stderr
    together = cost(learner_hosts=2, learner_gpus=2, replay_shards=6)
    assert (together.returncode, together.stdout) == (2, "")
    assert "replay_shards 6 is no multiple of the 4 learners" in together.stderr


def test_without_terraform_nobody_reads_the_variables(cost):
    result = cost(environment={"PATH": "/bin-of-nobody"})
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "terraform reads the variables, and is not installed: https://" in result.stderr


def test_a_learner_of_several_gpus_is_one_host(cost):
    text = cost(learner_instance_types=["g6.12xlarge"], learner_gpus=4).stdout
    assert columns(text, "learner: 1 x g6.12xlarge") == (4.60, 4.60, 4.60)


def test_each_learner_host_has_its_price_its_disk_and_its_address(cost):
    given = {"learner_instance_types": ["g6.4xlarge"], "actor_hosts": 3}
    one, two = (cost(**given, learner_hosts=hosts).stdout for hosts in (1, 2))
    price = PRICES["instances"]["g6.4xlarge"]["on_demand"][0]
    assert columns(two, "learner: 2 x g6.4xlarge") == pytest.approx((2 * price,) * 3, abs=0.005)
    gibibytes = [int(re.search(r"^volumes: (\d+) GiB", text, re.MULTILINE)[1]) for text in (one, two)]
    assert gibibytes[1] - gibibytes[0] == 200
    assert "addresses: 6 public IPv4" in two


def test_later_places_of_variables_win(tmp_path):
    """As Terraform reads them: defaults, the environment, terraform.tfvars, *.auto.tfvars, named files, flags."""
    directory = copy_of(ROOT / "deploy", tmp_path / "deploy")
    cluster = directory / "terraform" / "cluster"
    given, environment = [], {}

    def hosts() -> str:
        result = tell(directory, *given, environment=environment)
        assert result.returncode == 0, result.stderr
        return re.search(r"^actors: (\d+) x ", result.stdout, re.MULTILINE)[1]

    assert hosts() == "6"
    environment["TF_VAR_actor_hosts"] = "11"
    assert hosts() == "11"
    (cluster / "terraform.tfvars").write_text("actor_hosts = 12\n")
    assert hosts() == "12"
    (cluster / "a.auto.tfvars").write_text("actor_hosts = 13\n")
    assert hosts() == "13"
    (cluster / "b.auto.tfvars.json").write_text('{"actor_hosts": 14}')
    assert hosts() == "14"
    (tmp_path / "named.tfvars").write_text("actor_hosts = 15\n")
    given += ["-var-file", str(tmp_path / "named.tfvars")]
    assert hosts() == "15"
    given += ["-var", "actor_hosts=16"]
    assert hosts() == "16"


def test_a_learner_tells_how_many_hosts_it_can_use(cost):
    text = cost("--updates-per-second", "550").stdout
    assert "a learner of 550 updates/s of 512 takes 352,000 transitions/s at 0.8 samples an insert" in text
    assert f": {550 * 512 / 0.8 / 32 / 1856:.1f} hosts of c7i.8xlarge make them" in text and "the plan has 6" in text
    rate = ("--updates-per-second", "100")
    others = {"preset": "two-cores", "actor_instance_types": ["c7i.2xlarge"]}
    text = cost(*rate, **others).stdout
    assert "takes 2,560 transitions/s" in text and ": 0.2 hosts of c7i.2xlarge" in text
    others["learner_flags"] = {"batch_size": 32}
    assert "updates/s of 32 takes 1,280 transitions/s at 2.5" in cost(*rate, **others).stdout
    others["replay_flags"] = {"samples_per_insert": "4"}
    assert "updates/s of 32 takes 800 transitions/s at 4 s" in cost(*rate, **others).stdout
    refused = cost(*rate, agent="impala")
    assert refused.returncode == 2 and "agent impala and preset paper takes is not known" in refused.stderr
    told = "cannot cost: --updates-per-second 0: a positive number is needed\n"
    assert cost("--updates-per-second", "0").stderr == told
