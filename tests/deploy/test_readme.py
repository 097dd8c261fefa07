"""deploy/README.md says what the files beside it say."""

import re
import subprocess
import sys

import pytest

from tests.system.processes import ROOT

README = (ROOT / "deploy" / "README.md").read_text()
CLUSTER = ROOT / "deploy" / "terraform" / "cluster"


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "examples").glob("*.tfvars")), ids=lambda path: path.stem)
def test_the_cost_table_is_what_the_script_says(path):
    command = [sys.executable, str(ROOT / "deploy" / "cost.py"), "--var-file", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    price, planned = re.search(r"^an hour +(\S+) +(.*)$", text, re.MULTILINE).groups()
    row = next(line for line in README.splitlines() if line.startswith(f"| `{path.stem}` |"))
    assert f"| {price} | {planned} |" in row
    price, planned = re.search(r"^until the time limit of \d+ h +(\S+) +(.*)$", text, re.MULTILINE).groups()
    if path.stem != "smoke":
        low, high = planned.split(" to ")
        assert f"| {float(price):.0f} | {float(low):.0f} to {float(high):.0f} |" in row


def test_the_price_of_the_papers_rate_is_what_the_script_says():
    command = [sys.executable, str(ROOT / "deploy" / "cost.py"), "--frames-per-second", "50000"]
    command += ["--var-file", str(ROOT / "deploy" / "examples" / "360-actors.tfvars")]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    hours, price, low, high = re.search(r"^200M frames at .*: (\S+) h +(\S+) +(\S+) to (\S+)$", text, re.M).groups()
    dollars = f"{float(price):.0f} dollars on demand, {float(low):.0f} to {float(high):.0f} with actors on spot"
    assert f"they take {hours} hours: {dollars}" in README


def test_outputs_paths_and_links_exist():
    declared = set(re.findall(r'^output "(\w+)"', (CLUSTER / "outputs.tf").read_text(), re.MULTILINE))
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


def test_variables_are_those_of_the_configuration():
    declared = set(re.findall(r'^variable "(\w+)"', (CLUSTER / "variables.tf").read_text(), re.MULTILINE))
    for path in (ROOT / "deploy" / "examples").glob("*.tfvars"):
        assert set(re.findall(r"^(\w+) +=", path.read_text(), re.MULTILINE)) <= declared, path
    assert {"actor_hosts", "max_hours", "operator_cidrs", "image_version", "run", "name"} <= declared
