"""deploy/cost.py: every number again by hand, from the table."""

import json
import re
import subprocess
import sys

import pytest

from tests.system.processes import ROOT

PRICES = json.loads((ROOT / "deploy" / "prices.json").read_text())
SMALL = ("--replay-instance-type", "r7i.4xlarge", "--learner-instance-type", "g6.2xlarge", "--replay-volume-gib", "100")
SMALL += ("--learner-volume-gib", "200", "--max-hours", "10")


def cost(*arguments):
    command = [sys.executable, str(ROOT / "deploy" / "cost.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def columns(text, name):
    """The three numbers of a row: on demand, planned at least, planned at most."""
    row = next(line for line in text.splitlines() if line.startswith(name))
    found = re.search(r" (\d+\.\d\d)   (\d+\.\d\d)(?: to (\d+\.\d\d))?(?: \*)?$", row)
    return tuple(float(number) for number in (found[1], found[2], found[3] or found[2]))


def test_rows_and_sums_are_those_of_the_table():
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
    disks = (100 + 200 + 7 * 16) * PRICES["gp3_gib_month"][0] / 730
    assert columns(result.stdout, "volumes: 412 GiB") == pytest.approx((disks,) * 3, abs=0.005)
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


def test_without_a_measured_rate_there_is_no_price_of_frames():
    result = cost()
    assert result.returncode == 0
    assert "200M frames at" not in result.stdout and "--frames-per-second, as measured" in result.stdout
    assert cost("--frames-per-second", "0").returncode == 1


def test_what_was_not_looked_up_is_marked():
    text = cost("--learner-instance-type", "g6.2xlarge").stdout
    assert PRICES["compiled"] in text and "* from memory" in text
    assert re.search(r"^learner: .*\*$", text, re.MULTILINE)
    assert re.search(r"^learner: .*\d$", cost("--learner-instance-type", "g6.4xlarge").stdout, re.MULTILINE)


def test_another_region_and_unknown_types_are_told():
    assert "eu-west-1 is not in the table" in cost("--region", "eu-west-1").stdout
    result = cost("--actor-instance-types", "c7q.8xlarge")
    assert result.returncode == 1 and "no on_demand price of c7q.8xlarge" in result.stderr
    result = cost("--actor-instance-types", "r7i.4xlarge")
    assert result.returncode == 1 and "no spot price of r7i.4xlarge" in result.stderr
    assert cost("--actor-instance-types", "r7i.4xlarge", "--actor-on-demand-hosts", "99").returncode == 0


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


def test_the_examples_are_plans_with_a_price():
    for path in sorted((ROOT / "deploy" / "examples").glob("*.tfvars")):
        result = cost("--var-file", str(path))
        assert result.returncode == 0, result.stderr
