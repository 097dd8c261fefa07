"""deploy/cost.py: every number again by hand, from the table."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.deploy.terraform import copy_of
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("commands for EC2")

PRICES = json.loads((ROOT / "deploy" / "prices.json").read_text())
SMALL = (
    "--replay-instance-type",
    "r7i.4xlarge",
    "--learner-instance-types",
    "g6.2xlarge",
    "--replay-volume-gib",
    "100",
)
SMALL += ("--learner-volume-gib", "200", "--max-hours", "10")


def tell(directory, *arguments, **environment):
    """Runs the script in a copy of deploy/."""
    command = [sys.executable, str(directory / "cost.py"), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="session")
def cost(deploy):
    """The script where no cluster is described; further variables of its environment by name."""
    return lambda *arguments, **environment: tell(deploy, *arguments, **environment)


def columns(text, name):
    """The three numbers of a row: on demand, planned at least, planned at most."""
    row = next(line for line in text.splitlines() if line.startswith(name))
    found = re.search(r" (\d+\.\d\d)   (\d+\.\d\d)(?: to (\d+\.\d\d))?(?: \*)?$", row)
    return tuple(float(number) for number in (found[1], found[2], found[3] or found[2]))


def test_rows_and_sums_are_those_of_the_table(cost):
    types = ("--actor-instance-types", "c7i.8xlarge", "m7a.8xlarge")
    hosts = ("--actor-hosts", "7", "--actor-on-demand-hosts", "2")
    result = cost(*SMALL, *types, *hosts, "--frames-per-second", "20000")
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
    assert cost("--frames-per-second", "0").returncode == 1


def test_what_was_not_looked_up_is_marked(cost):
    text = cost("--learner-instance-types", "g6.2xlarge").stdout
    assert PRICES["compiled"] in text and "* from memory" in text
    assert re.search(r"^learner: .*\*$", text, re.MULTILINE)
    assert re.search(r"^learner: .*\d$", cost("--learner-instance-types", "g6.4xlarge").stdout, re.MULTILINE)


def test_a_learner_of_another_type_than_the_first_has_another_price(cost):
    """The first one is meant, and the range is that of all."""
    types = ("g6.4xlarge", "g6.8xlarge", "g6.xlarge")
    first, dear, cheap = (2 * PRICES["instances"][name]["on_demand"][0] for name in types)
    text = cost("--learner-instance-types", *types, "--learner-hosts", "2").stdout
    row = "learner: 2 x g6.4xlarge (or g6.8xlarge, g6.xlarge)"
    assert columns(text, row) == pytest.approx((first, cheap, dear), abs=0.005)


def test_another_region_and_unknown_types_are_told(cost):
    assert "eu-west-1 is not in the table" in cost("--region", "eu-west-1").stdout
    result = cost("--actor-instance-types", "c7q.8xlarge")
    assert result.returncode == 1 and "no on_demand price of c7q.8xlarge" in result.stderr
    result = cost("--actor-instance-types", "r7i.4xlarge")
    assert result.returncode == 1 and "no spot price of r7i.4xlarge" in result.stderr
    assert cost("--actor-instance-types", "r7i.4xlarge", "--actor-on-demand-hosts", "6").returncode == 0


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


WRONG = [
    (("--actor-hosts", "-1"), "actor_hosts is -1: it has to be from 0 to 200"),
    (("--actor-hosts", "201"), "actor_hosts is 201: it has to be from 0 to 200"),
    (("--actor-on-demand-hosts", "-2"), "actor_on_demand_hosts is -2: it has to be from 0 to actor_hosts (6)"),
    (("--actor-on-demand-hosts", "7"), "actor_on_demand_hosts is 7: it has to be from 0 to actor_hosts (6)"),
    (("--replay-volume-gib", "0"), "replay_volume_gib is 0: it has to be from 8 to 16384"),
    (("--learner-volume-gib", "-8"), "learner_volume_gib is -8: it has to be from 8 to 16384"),
    (("--max-hours", "0"), "max_hours is 0: it has to be from 1 to 168"),
    (("--actor-workers-per-host", "-1"), "actor_workers_per_host is -1: it has to be from 0 to 1024"),
    (("--replay-shards", "17"), "replay_shards is 17: it has to be from 0 to 16"),
]


@pytest.mark.parametrize(("flags", "finding"), WRONG)
def test_what_terraform_refuses_has_no_price(cost, flags, finding):
    result = cost(*flags)
    assert (result.returncode, result.stdout) == (1, "") and finding in result.stderr, result.stderr
    name = finding.partition(" ")[0]
    declared = (ROOT / "deploy/terraform/cluster/variables.tf").read_text().partition(f'variable "{name}" {{')[2]
    assert re.search(r"from \S+ to \w+", finding)[0] in declared.partition("\n}\n")[0], "as Terraform says it"


@pytest.mark.parametrize(
    ("flags", "finding"),
    [
        (("--cluster", "releases"), "name is releases: there the bucket keeps the releases"),
        (("--learner-gpus", "3"), "learner_gpus is 3: it has to be 1, 2, 4 or 8"),
        (("--learner-gpus", "4", "--replay-shards", "6"), "it has to be a multiple of the 4 learners"),
        (("--learner-gpus", "4", "--actor-workers-per-host", "3"), "it has to be 0, or at least 4"),
        (("--learner-hosts", "3"), "learner_hosts is 3: it has to be 1, 2, 4 or 8, with 1 GPUs each at most 16"),
        (("--learner-hosts", "4", "--learner-gpus", "8"), "with 8 GPUs each at most 16 in all"),
        (("--learner-hosts", "2", "--learner-gpus", "2", "--replay-shards", "6"), "a multiple of the 4 learners"),
    ],
)
def test_what_does_not_fit_together_has_no_price(cost, flags, finding):
    result = cost(*flags)
    assert (result.returncode, result.stdout) == (1, "") and finding in result.stderr, result.stderr


def test_a_learner_of_several_gpus_is_one_host(cost):
    text = cost("--learner-instance-types", "g6.12xlarge", "--learner-gpus", "4").stdout
    assert columns(text, "learner: 1 x g6.12xlarge") == (4.60, 4.60, 4.60)


def test_each_learner_host_has_its_price_its_disk_and_its_address(cost):
    learner = ("--learner-instance-types", "g6.4xlarge")
    one, two = (cost(*learner, "--learner-hosts", hosts, "--actor-hosts", "3").stdout for hosts in ("1", "2"))
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
        result = tell(directory, *given, **environment)
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
    given += ["--var-file", str(tmp_path / "named.tfvars")]
    assert hosts() == "15"
    given += ["--actor-hosts", "16"]
    assert hosts() == "16"


def test_a_learner_tells_how_many_hosts_it_can_use(cost):
    text = cost("--updates-per-second", "550").stdout
    assert "a learner of 550 updates/s of 512 takes 352,000 transitions/s at 0.8 samples an insert" in text
    assert f": {550 * 512 / 0.8 / 32 / 1856:.1f} hosts of c7i.8xlarge make them" in text and "the plan has 6" in text
    others = ("--batch-size", "64", "--samples-per-insert", "2.5", "--actor-instance-types", "c7i.2xlarge")
    text = cost("--updates-per-second", "100", *others).stdout
    assert "takes 2,560 transitions/s" in text and ": 0.2 hosts of c7i.2xlarge" in text
    assert cost("--updates-per-second", "0").returncode == 1
    flags = {"TF_VAR_preset": "two-cores", "TF_VAR_learner_flags": "{ batch_size = 32 }"}
    assert "updates/s of 32 takes 1,280 transitions/s at 2.5" in cost("--updates-per-second", "100", **flags).stdout
    flags |= {"TF_VAR_replay_flags": '{ samples_per_insert = "4" }'}
    assert "updates/s of 32 takes 800 transitions/s at 4 s" in cost("--updates-per-second", "100", **flags).stdout
    refused = cost("--updates-per-second", "100", TF_VAR_agent="impala")
    assert refused.returncode == 1 and "agent impala and preset paper takes is not known" in refused.stderr
    result = cost("--updates-per-second", "1", "--samples-per-insert", "0")
    assert (result.returncode, result.stderr) == (
        1,
        "cannot tell the cost: --samples-per-insert 0: a positive number is needed\n",
    )
