"""deploy/README.md says what the files beside it say."""

import json
import re

import pytest

from tests.system.processes import ROOT

README = (ROOT / "deploy" / "README.md").read_text()
CLUSTER = ROOT / "deploy" / "terraform" / "cluster"


def test_the_printed_cost_is_what_the_script_prints(cost):
    [shown] = re.findall(r"^```\n(apexrl-192: US dollars.*?)\n\.\.\.\n```$", README, re.MULTILINE | re.DOTALL)
    printed = cost("192-actors").stdout.splitlines()
    assert shown.splitlines() == printed[: len(shown.splitlines())]
    assert printed[len(shown.splitlines()) - 1].startswith("until the time limit")


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "examples").glob("*.tfvars")), ids=lambda path: path.stem)
def test_the_cost_table_is_what_the_script_says(cost, path):
    text = cost(path.stem).stdout
    price, planned = re.search(r"^an hour +(\S+) +(.*)$", text, re.MULTILINE).groups()
    row = next(line for line in README.splitlines() if line.startswith(f"| `{path.stem}` |"))
    assert f"| {price} | {planned} |" in row
    price, planned = re.search(r"^until the time limit of \d+ h +(\S+) +(.*)$", text, re.MULTILINE).groups()
    if path.stem != "smoke":
        low, high = planned.split(" to ")
        assert f"| {float(price):.0f} | {float(low):.0f} to {float(high):.0f} |" in row


def test_the_price_of_the_papers_rate_is_what_the_script_says(cost):
    text = cost("360-actors", "--frames-per-second", "50000").stdout
    hours, price, low, high = re.search(r"^200M frames at .*: (\S+) h +(\S+) +(\S+) to (\S+)$", text, re.M).groups()
    dollars = f"{float(price):.0f} dollars on demand, {float(low):.0f} to {float(high):.0f} with actors on spot"
    assert f"they take {hours} hours: {dollars}" in README


def test_outputs_paths_and_links_exist():
    declared = names_in("output", CLUSTER / "outputs.tf")
    watched = README.partition("## Watch")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", watched, re.MULTILINE))
    assert named and named <= declared
    for name in re.findall(r"deploy/[\w./-]+\w", README):
        written_by_a_step = name.endswith(("backend.hcl", ".auto.tfvars", "terraform.tfvars", ".tfstate"))
        if not written_by_a_step and not name.startswith("deploy/.venv"):
            assert (ROOT / name).exists(), name
    for anchor in re.findall(r"\]\(#([\w-]+)\)", README):
        headings = [re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in README.splitlines()]
        assert anchor in headings, anchor


def names_in(kind: str, *paths) -> set[str]:
    """Returns what configurations declare as a variable or an output."""
    return {name for path in paths for name in re.findall(rf'^{kind} "(\w+)"', path.read_text(), re.MULTILINE)}


def test_names_in_the_text_are_those_of_the_configurations():
    """Words with an underscore in code, alone or before a value, are variables, outputs or flags of a role."""
    bootstrap = CLUSTER.parent / "bootstrap"
    packer = ROOT / "deploy" / "packer" / "variables.pkr.hcl"
    known = names_in("output", CLUSTER / "outputs.tf", bootstrap / "outputs.tf")
    known |= names_in("variable", *CLUSTER.glob("*.tf"), bootstrap / "variables.tf", packer)
    roles = [flags for roles in json.loads((CLUSTER / "flags.json").read_text()).values() for flags in roles.values()]
    known |= {name for flags in roles for name in flags}
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([a-z]+_[a-z_]+)(?: = [^`]*)?`", prose))
    named |= set(re.findall(r"-var '?([a-z_]+)=", README))
    assert len(named) > 10 and named <= known, named - known


def test_each_command_that_takes_a_region_names_one():
    """All but those that read it from the variables."""
    commands = re.findall(
        r"(?:^|`)((?:aws (?:ssm|ec2|autoscaling)|python -m deploy keys) [^`\n]*)", README, re.MULTILINE
    )
    commands = [command for command in commands if command != "aws ssm start-session"]
    assert len(commands) >= 6
    assert not [command for command in commands if "--region " not in command]
    assert not re.findall(r"`terraform (?!-chdir=deploy/terraform/)[^`]*`", README.partition("## Watch")[2])
