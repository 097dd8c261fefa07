"""deploy/tfvars.py against Terraform itself, and with hypothesis."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deploy.needed import find_terraform
from tests.system.processes import ROOT

sys.path.insert(0, str(ROOT / "deploy"))
from tfvars import DeployError, read_defaults, read_literal, read_tfvars

TRICKY = r"""
# a comment
name = "a \"quoted\" \\ text, a tab\t, \u00e9" // another
hosts=3
share   = -1.5e-1 /* and
one over lines */
on = true
off = false
nothing = null
types = [
  "c7i.8xlarge", # preferred
  "c7a.8xlarge",
]
empty = []
nested = [[1, 2], []]
flags = {
  learning-rate = "0.1"
  "a b" : "$${not} %%{a template}", c = "d"
}
none = {}
"""


def as_hcl(value) -> str:
    """Writes a value as Terraform reads it."""
    if isinstance(value, str):
        return (
            json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{").replace("\x7f", "\\u007f")
        )
    if isinstance(value, list):
        return "[" + ", ".join(as_hcl(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{\n" + "".join(f"{as_hcl(key)} = {as_hcl(item)}\n" for key, item in value.items()) + "}"
    return json.dumps(value)


# python-hcl2 cannot read one thing that Terraform can: an escaped ${ or %{ without its }.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda text: not re.search(r"\{[^}]*$", text)
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@settings(deadline=None)  # the first reading makes the parser
@given(values)
def test_every_value_comes_back(value):
    assert read_literal(as_hcl(value), "test") == value


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_value_or_a_clear_error(text):
    try:
        read_literal(text, "test")
    except DeployError as error:
        assert str(error).startswith("test: ")


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("hosts = 2 * 3", "hosts: ${2 * 3} is not a literal"),
        ("hosts = max(1, 2)", "is not a literal"),
        ("hosts = var.other", "is not a literal"),
        ("hosts = other", "other is not a literal"),
        ('name = "a-${var.other}"', "templates"),
        ("name = <<EOT\nx\nEOT", "heredocs"),
        (r'name = "\q"', "is not a string"),
        ('name = "open', "line 2"),
        ("hosts = [1 2]", "line 2"),
        ("hosts 3", "line 2"),
        ("hosts =", "line 2"),
    ],
)
def test_more_than_literals_is_refused_with_its_place(tmp_path, text, finding):
    path = tmp_path / "wrong.tfvars"
    path.write_text(f"\n{text}\n")
    with pytest.raises(DeployError, match=r"wrong\.tfvars: ") as error:
        read_tfvars(path)
    assert finding in str(error.value)


def test_json_files_and_their_errors(tmp_path):
    path = tmp_path / "terraform.tfvars.json"
    path.write_text('{"actor_hosts": 3, "operator_cidrs": []}')
    assert read_tfvars(path) == {"actor_hosts": 3, "operator_cidrs": []}
    for text in ("{", "[1]"):
        path.write_text(text)
        with pytest.raises(DeployError, match=r"terraform.tfvars.json"):
            read_tfvars(path)
    with pytest.raises(DeployError, match="cannot be read"):
        read_tfvars(tmp_path / "missing.tfvars")


def test_terraform_reads_the_same_from_a_file_of_variables(tmp_path):
    terraform = find_terraform()
    (tmp_path / "terraform.tfvars").write_text(TRICKY)
    ours = read_tfvars(tmp_path / "terraform.tfvars")
    assert len(ours) == 11
    names = "".join(f'variable "{name}" {{\n  type = any\n}}\n' for name in ours)
    everything = ", ".join(f"{name} = var.{name}" for name in ours)
    (tmp_path / "main.tf").write_text(f'{names}output "all" {{\n  value = jsonencode({{ {everything} }})\n}}\n')
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 100}
    subprocess.run([terraform, "apply", "-auto-approve", "-no-color"], check=True, **run)
    shown = subprocess.run([terraform, "output", "-raw", "all"], check=True, **run).stdout
    assert ours == json.loads(shown)


def test_defaults_are_those_of_the_configuration():
    defaults = read_defaults(ROOT / "deploy" / "terraform" / "cluster" / "variables.tf")
    assert defaults["max_hours"] == 24 and defaults["operator_cidrs"] == [] and defaults["results_bucket"] is None
    assert defaults["actor_instance_types"][0] == "c7i.8xlarge"


def test_files_are_formatted(deploy):
    command = [find_terraform(), "fmt", "-check", "-recursive", "-diff", str(deploy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
