"""Variables: each wrong value gets an error that names the variable and what to do; each flag reaches its role."""

import dataclasses
import itertools
import json
import typing
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest

from apexrl.config import flags
from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.config.sections import Changing
from apexrl.errors import ConfigError
from apexrl.learning.sharing import share_of
from deploy import flags as flag_patterns
from tests.deploy.terraform import BUCKET, Workspace, role_environment, rounds, user_data, variable_names
from tests.system.processes import ROOT

WRONG: list[tuple[str, Any, str]] = [
    ("name", "Apex RL", "such as apexrl"),
    ("region", "virginia", "such as us-east-1"),
    ("tags", {"Role": "mine"}, "choose other names"),
    ("tags", {"AWS:mine": "x"}, "must not begin with aws:"),
    ("env", "Pong; rm -rf /", "such as PongNoFrameskip-v4"),
    ("preset", "auto", "paper, gpu, two-cores or small"),
    ("seed", -1, "0 to 4294967295"),
    ("run", "../x", "letters, digits"),
    ("results_bucket", None, "cluster_tfvars > deploy/terraform/cluster/bootstrap.auto.tfvars"),
    ("results_bucket", "A_bucket", "terraform -chdir=deploy/terraform/bootstrap output -raw"),
    ("name", "releases", "there the bucket keeps the releases"),
    ("image_version", "a b", "leave it out to keep the first"),
    ("release", "a b", "leave it out to start from images"),
    ("replay_instance_type", "large", "such as r6in.4xlarge"),
    ("learner_instance_types", [], "such as ["),
    ("learner_instance_types", ["g6"], "such as ["),
    ("learner_instance_types", ["g6.4xlarge", "g6.4xlarge"], "name each once"),
    ("actor_instance_types", [], "such as ["),
    ("actor_instance_types", ["c7i"], "such as ["),
    ("actor_instance_types", ["c7i.8xlarge", "c7i.8xlarge"], "name each once"),
    ("actor_workers_per_host", -1, "one per vCPU"),
    ("environments_per_worker", 0, "leave it out for the preset's"),
    ("replay_volume_gib", 4, "8 to 16384"),
    ("learner_volume_gib", 0.5, "8 to 16384"),
    ("agent_flags", {"gama": 0.9}, 'gama = "0.9" is none of epsilon_base, epsilon_exponent, evaluation_epsilon, gamma'),
    ("replay_flags", {"capacity": "lots"}, 'capacity = "lots" has to match'),
    ("replay_flags", {"journal_dir": "/tmp"}, "is none of capacity"),
    ("learner_flags", {"batch-size": 512}, "is none of batch_size"),
    ("learner_flags", {"optimizer": "sgd"}, "has to match ^(adam|rmsprop)$"),
    ("learner_flags", {"batch_size": 0}, "has to match"),
    ("learner_flags", {"device": "cuda $(reboot)"}, "has to match"),
    ("actor_flags", {"num_workers": 4}, "is none of action_mask"),
    ("evaluator_flags", {"episodes": -1}, "has to match"),
    ("vpc_cidr", "8.8.0.0/20", "such as 10.79.0.0/20"),
    ("vpc_cidr", "10.79.0.1/20", "by its first address"),
    ("vpc_cidr", "10.79.0.0", "such as 10.79.0.0/20"),
    ("operator_cidrs", ["me"], "https://checkip.amazonaws.com"),
    ("operator_cidrs", ["::/0"], "https://checkip.amazonaws.com"),
    ("operator_cidrs", ["0.0.0.0/0"], "Give your address with /32"),
    ("max_hours", 1000, "1 to 168"),
    ("vpc_id", "mine", "such as vpc-0123456789abcdef0"),
    ("proxy", "proxy.example.com", "such as http://proxy.example.com:3128"),
    ("permissions_boundary", "boundary", "such as arn:aws:iam::123456789012:policy/boundary"),
    ("log_retention_days", 10, "CloudWatch knows no others"),
]
"""Variable, value, words of the error. Terraform tells all errors of this kind at once: see `rounds`."""

WRONG_TOGETHER: list[list[tuple[str, Any, str]]] = [
    [
        ("actor_hosts", "many", "a number is required"),
        ("use_placement_group", "maybe", "a bool is required"),
    ],
    [
        ("availability_zone", "us-west-2a", "us-east-1a; leave it out"),
        ("subnet_ids", ["mine"], 'such as ["subnet-0123456789abcdef0"]'),
        ("kms_key_id", "arn:aws:kms:eu-west-1:123456789012:key/1", "a KMS key in region us-east-1"),
        ("actor_on_demand_hosts", 7, "from 0 to actor_hosts (6)"),
        ("learner_hosts", 3, "1, 2, 4 or 8"),
    ],
    [
        ("actor_hosts", 1.5, "0 to 200"),
        ("agent", "ppo", "apex-dqn or impact or impala"),
        ("learner_gpus", 3, "1, 2, 4 or 8"),
    ],
    [("replay_shards", 17, "from 0 to 16")],
    [("learner_hosts", 8, "with learner_gpus 4 at most 16 GPUs in all"), ("learner_gpus", 4, "at most 16 GPUs in all")],
    [
        ("release", "v1", "hosts install a release, or start from images"),
        ("image_version", "1.0.0", "exclude each other"),
    ],
    [
        ("learner_gpus", 4, "the GPUs of learner_instance_types g6.4xlarge (1), g5.4xlarge (1)"),
        ("actor_instance_types", ["c7i.8xlarge", "c7i.large"], "c7i.large have fewer vCPUs"),
    ],
    [
        ("image_version", "7.0.0", "`packer build`"),
        ("actor_instance_types", ["c7q.8xlarge"], "No zone of us-east-1 offers c7q.8xlarge"),
    ],
    [("availability_zone", "us-east-1e", "zones that offer all instance types: us-east-1a, us-east-1b")],
    [
        ("results_bucket", "apexrl-results-123456789012-us-west-2", "use the region of deploy/terraform/bootstrap"),
        ("replay_instance_type", "t3.micro", "use_placement_group = false"),
        ("learner_instance_types", ["g6.4xlarge", "c7i.8xlarge"], "types c7i.8xlarge have no NVIDIA GPU"),
        ("actor_instance_types", ["c8g.8xlarge"], "The images are x86_64, which c8g.8xlarge cannot run"),
        ("learner_volume_gib", 50, "the gpu image's 90 GiB"),
    ],
    [
        (
            "learner_instance_types",
            ["g6.4xlarge", "p3dn.24xlarge"],
            "p3dn.24xlarge have no whole GPU that the image's driver drives: choose one of g4dn, g5",
        )
    ],
    [
        ("actor_hosts", 129, "4128 actors for each replay server, which takes 4096"),
        ("environments_per_worker", 64, "264192 environments for each replay server, which takes 262144"),
    ],
]
"""Values of another type, or wrong beside another variable's or beside what AWS has; one plan for a list."""

WRONG_REGIONS = [
    ("us-west-2", {}, "There is no image with the tags Project=apexrl, Role=cpu"),
    ("us-east-2", {}, "set image_version to one that both have"),
    ("eu-west-1", {}, "No zone of eu-west-1 offers g6.4xlarge"),
    (
        "eu-west-1",
        {"learner_instance_types": ["p4d.24xlarge"], "actor_instance_types": ["c8a.8xlarge"]},
        "No zone of eu-west-1 offers c8a.8xlarge, p4d.24xlarge, r6in.4xlarge together",
    ),
]
WRONG_BOOTSTRAP: list[tuple[str, Any, str]] = [
    ("region", "here", "such as us-east-1"),
    ("permissions_boundary", "boundary", "such as arn:aws:iam::123456789012:policy/boundary"),
    ("name", "x", "3 to 20 small letters"),
    ("budget_emails", [], "you@example.com"),
    ("budget_emails", ["me"], "you@example.com"),
    ("budget_usd_per_month", 0, "number of dollars"),
]
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.tfvars"))
COMMANDS = {"replay": ReplayCommand, "learner": LearnerCommand, "actor": ActorCommand, "evaluator": ActorCommand}


def refused_with_cures(workspace: Workspace, right: dict[str, Any], cases: list[tuple[str, Any, str]]) -> None:
    """Plans with the values of a round, each of which has to get an error with its name and cure."""
    result = workspace.plan(right | {name: value for name, value, _ in cases})
    assert result.returncode == 1, result.stdout
    errors = result.stderr.split("Error: ")
    for name, _, cure in cases:
        assert [error for error in errors if name in error and cure in error], (name, cure, result.stderr)


@pytest.mark.parametrize("cases", rounds(WRONG))
def test_a_wrong_value_is_named_with_its_cure(cluster, cases):
    refused_with_cures(cluster, {"results_bucket": BUCKET}, cases)


@pytest.mark.parametrize("cases", WRONG_TOGETHER)
def test_a_value_that_is_wrong_beside_others_is_named_with_its_cure(cluster, cases):
    refused_with_cures(cluster, {"results_bucket": BUCKET}, cases)


def test_a_wrong_value_is_tried_for_each_variable():
    assert {name for name, _, _ in itertools.chain(WRONG, *WRONG_TOGETHER)} == set(variable_names("cluster"))
    assert {name for name, _, _ in WRONG_BOOTSTRAP} == set(variable_names("bootstrap"))


@pytest.mark.parametrize(("region", "others", "cure"), WRONG_REGIONS)
def test_a_region_that_lacks_something_is_named_with_the_cure(cluster, region, others, cure):
    bucket = BUCKET.replace("us-east-1", region)
    result = cluster.plan({"results_bucket": bucket, "region": region, **others})
    assert result.returncode == 1 and cure in result.stderr, result.stderr


@pytest.mark.parametrize("cases", rounds(WRONG_BOOTSTRAP))
def test_a_wrong_value_for_bootstrap_is_named_with_its_cure(bootstrap, cases):
    refused_with_cures(bootstrap, {"budget_emails": ["you@example.com"]}, cases)


def test_more_hosts_than_addresses_are_refused(cluster):
    result = cluster.plan({"results_bucket": BUCKET, "vpc_cidr": "10.79.0.0/26", "actor_hosts": 60})
    assert result.returncode == 1 and "give a wider vpc_cidr" in result.stderr


def test_what_terraform_knows_of_flags_is_what_the_code_has():
    written = flag_patterns.FLAGS_FILE.read_text()
    assert written == flag_patterns.text_of_all(), "python -m deploy flags writes it anew"
    limits = flag_patterns.LIMITS_FILE.read_text()
    assert limits == flag_patterns.text_of_limits(), "python -m deploy flags writes it anew"


@pytest.mark.parametrize("num_learners", [1, 2, 4, 8, 16])
def test_the_batches_that_terraform_divides_are_those_that_learners_share(num_learners):
    batches = json.loads(flag_patterns.LIMITS_FILE.read_text())["batches"]
    for agent, preset in itertools.product(batches, flag_patterns.PRESETS):
        told = batches[agent][preset]
        rows = Fraction(told["batch_size"], num_learners)
        shares = [
            1,
            Fraction(1, told.get("minibatches", 1)),
            *(Fraction(part.split("=")[1]) for part in told.get("mix", ())),
        ]
        command = flags.parse(LearnerCommand, ["--agent", agent, "--preset", preset])
        refused = (
            pytest.raises(ConfigError) if any((rows * share).denominator > 1 for share in shares) else nullcontext()
        )
        with refused:
            share_of(command, num_learners)


def test_more_replay_servers_take_more_actors(cluster):
    """As many as one takes pass, and no more; with two servers twice as many."""
    given = {"results_bucket": BUCKET, "environments_per_worker": 64}
    assert cluster.plan(given | {"actor_hosts": 128}).returncode == 0
    assert cluster.plan(given | {"actor_hosts": 200, "replay_shards": 2}).returncode == 0


def test_gpus_that_nobody_uses_or_that_differ_are_told(cluster):
    types = {"learner_instance_types": ["g6.4xlarge", "g6.12xlarge"]}
    for given, told in (
        (types, "g6.12xlarge has 4: all GPUs cost, and learner_gpus is 1"),
        ({"learner_hosts": 2}, "g6.4xlarge, g5.4xlarge have GPUs of several kinds, and learner_hosts is 2"),
    ):
        result = cluster.plan({"results_bucket": BUCKET} | given)
        assert result.returncode == 0 and told in " ".join(result.stdout.split()), result.stdout


def values_of(command) -> dict[str, Any]:
    """Returns all fields of a command by name, whatever record they are in."""
    values = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        values.update(values_of(value) if dataclasses.is_dataclass(value) else {field.name: value})
    return values


def another(name: str, kind: Any, value: Any) -> Any:
    """Returns a value that the flag takes and that is not its default."""
    chosen = {
        "tables": ("transitions=priority", "recent=uniform"),
        "channels": (8, 16, 24),
        "device": "cuda:1",
        "wrapper": ("module:one", "module:two"),
        "resize": (84, 96),
        "mix": ("uniform=1/4", "uniform@500=3/4"),
        "batch_size": 720,  # which these shares and all samples of minibatches divide
    }
    if name in chosen:
        return chosen[name]
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != value)
    if kind is bool:
        return not value
    if kind == Changing:
        return "0.5:0.25:5M:cosine"
    return {int: lambda: value + 1, float: lambda: value / 2 + 0.0001, str: lambda: f"{value}-2"}[kind]()


def text_of(value: Any) -> str:
    """Returns a value as a variable of flags takes it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def samples(agent: str, role: str) -> dict[str, Any]:
    """Returns another value for each flag of a role."""
    defaults = {}
    for command in COMMANDS.values():
        defaults |= values_of(flags.default_command(command, agent))
    configs = flag_patterns.configs_of(agent)[role]
    kinds = {name: kind for config in configs for name, kind in typing.get_type_hints(config).items()}
    return {name: another(name, kinds[name], defaults[name]) for name in flag_patterns.make_patterns(agent)[role]}


def commands_of(state) -> dict[str, Any]:
    """Returns the command of each role, as the code itself reads the flags in the rendered role.env."""
    environments = {role: role_environment(text) for role, text in user_data(state).items()}
    lines = {role: environment["APEXRL_FLAGS"] for role, environment in environments.items()}
    lines["evaluator"] = environments["replay"]["APEXRL_EVALUATOR_FLAGS"]
    return {role: flags.parse(COMMANDS[role], line.split()) for role, line in lines.items()}


@pytest.mark.parametrize("agent", flag_patterns.agents())
def test_every_flag_reaches_the_role_it_is_for(apply_cluster, agent):
    given = {role: samples(agent, role) for role in flag_patterns.ROLES}
    plain = {
        "agent": agent,
        "env": "ALE/Breakout-v5",
        "preset": "two-cores",
        "seed": 17,
        "actor_workers_per_host": 7,
        "environments_per_worker": 5,
    }
    variables = {
        f"{role}_flags": {name: text_of(value) for name, value in flags.items()} for role, flags in given.items()
    }
    found = {role: values_of(command) for role, command in commands_of(apply_cluster(plain | variables)).items()}
    hosts = {"agent": agent, "preset": "two-cores", "seed": 17}
    hosts |= {"replay_host": "10.79.0.10", "learner_host": "10.79.0.11"}
    acting = {"env": "ALE/Breakout-v5"} | given["agent"]
    expected = {
        "replay": hosts | given["replay"] | {"bind_host": "0.0.0.0"},
        "learner": hosts | given["agent"] | given["learner"] | {"bind_host": "0.0.0.0"},
        "actor": hosts | acting | given["actor"] | {"num_workers": 7, "environments_per_worker": 5},
        "evaluator": hosts | acting | given["evaluator"],
    }
    own = ["--agent", agent, "--preset", "two-cores"]
    defaults = {role: values_of(flags.parse(command, own)) for role, command in COMMANDS.items()}
    for role, values in expected.items():
        assert found[role] == defaults[role] | values, role


def test_what_is_not_given_is_the_presets(applied):
    hosts = {"replay_host": "10.79.0.10", "learner_host": "10.79.0.11"}
    bound = {"bind_host": "0.0.0.0"}
    own = {"replay": bound, "learner": bound | {"device": "cuda"}}
    for role, command in commands_of(applied).items():
        preset = values_of(flags.parse(COMMANDS[role], ["--preset", "paper"]))
        assert values_of(command) == preset | hosts | own.get(role, {}), role


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_planned(cluster, path):
    cluster.give({"results_bucket": BUCKET})
    cluster.must("plan", "-input=false", "-lock=false", "-out=plan", f"-var-file={path}")
    outputs = json.loads(cluster.must("show", "-json", "plan"))["planned_values"]["outputs"]
    wanted = path.stem.removesuffix("-actors")
    assert not wanted.isdigit() or outputs["actor_processes"]["value"] == int(wanted)
