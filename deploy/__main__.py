"""`python -m deploy COMMAND`: a cluster on EC2 by one command; `python -m deploy --help` lists them all.

Status 0: done. 1: a command failed, or a wait was in vain. 2: something has to be changed first; one line says what.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import NoReturn

NEEDS = Path(__file__).with_name("requirements.txt")
INSTALL = f"{shlex.quote(sys.executable)} -m pip install -r {shlex.quote(str(NEEDS))}"
PLAN = "a name in deploy/examples, or a file; left out: the cluster of deploy/terraform/cluster"


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}: `{self.prog} --help` lists what there is\n")


def _parser(program: str) -> Parser:
    parser = Parser(program, description="Runs a cluster on EC2.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, plan: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if plan:
            made.add_argument("plan", nargs="?", default="", metavar="PLAN", help=PLAN)
        return made

    up = command("up", "starts a cluster, or goes on where an earlier start stopped", plan=True)
    up.add_argument("--email", action="append", default=[], help="where the alarm about money writes to (at first)")
    up.add_argument("--images", action="store_true", help="build images with Packer, if there are none")
    up.add_argument("--upgrade", action="store_true", help="move to the version that is checked out")
    up.add_argument("--wait-minutes", type=int, default=30, metavar="N", help="longest wait for the first frames (30)")
    up.add_argument("--no-tunnel", action="store_true", help="do not open TensorBoard at the end")
    command("status", "shows the cluster's hosts, its deadline, and how far it is")
    command("watch", "opens a tunnel to TensorBoard: http://127.0.0.1:6006")
    logs = command("logs", "follows the logs of all hosts, or of one role")
    logs.add_argument("role", nargs="?", default="", choices=("", "replay", "learner", "actor"))
    logs.add_argument("--since", default="10m", metavar="TIME", help="how far back to begin (10m)")
    scale = command("scale", "changes the number of actor hosts")
    scale.add_argument("hosts", type=int, metavar="N")
    down = command("down", "destroys the cluster and its experience; results, keys and images stay")
    for each in (up, scale, down):
        each.add_argument("--yes", action="store_true", help="do not ask, neither about a price nor about a change")
    preflight = command("preflight", "asks AWS whether the account can run a plan, and changes nothing", plan=True)
    for each in (up, preflight):
        each.add_argument("--request-quotas", action="store_true", help="ask AWS for the quotas that are too low")
    cost = command("cost", "tells the price of a plan", plan=True)
    cost.add_argument("--frames-per-second", type=float, metavar="N", help="as measured on such a cluster")
    cost.add_argument("--updates-per-second", type=float, metavar="N", help="as measured on such a learner of Ape-X")
    for each in (preflight, cost):
        each.add_argument("-var", action="append", default=[], metavar="NAME=VALUE", help="a variable, as of terraform")
        each.add_argument("-var-file", action="append", default=[], metavar="FILE", help="a file of variables")
    keys = command("keys", "makes the keys of a cluster that are missing, and stores them encrypted in AWS")
    keys.add_argument("--cluster", required=True, metavar="NAME", help="the variable `name` of the cluster")
    keys.add_argument("--region", required=True)
    keys.add_argument("--rotate", action="store_true", help="make all anew; running hosts keep theirs until a restart")
    command("flags", "writes what Terraform, `apexrl.train` and docs/ know of the flags anew, from the code")
    return parser


def main(words: list[str], program: str = "python -m deploy") -> int:
    """Runs one command, as somebody has typed it; returns the exit status."""
    chosen = _parser(program).parse_args(words)
    try:
        if chosen.command == "flags":
            from deploy import flags, reference  # noqa: PLC0415 - they need what `bash run.sh` installs

            flags.write()
            reference.write()
            return 0
        from deploy import commands, up  # noqa: PLC0415 - they need what INSTALL installs
        from deploy.aws import AwsError, explain  # noqa: PLC0415
        from deploy.steps import DeployError, StepError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        cure = "bash run.sh --help, and its .venv/bin/python" if chosen.command == "flags" else INSTALL
        print(f"cannot {chosen.command}: no module {error.name} in {sys.executable}: {cure}", file=sys.stderr)
        return 2
    try:
        return getattr(up if chosen.command == "up" else commands, chosen.command)(chosen) or 0
    except AwsError as error:
        print(f"cannot {chosen.command}: {': '.join(explain(error))}", file=sys.stderr)
        return 2
    except (DeployError, OSError) as error:
        print(f"cannot {chosen.command}: {error}", file=sys.stderr)
        return 2
    except StepError as error:
        print(f"{chosen.command} stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{chosen.command} was stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
