"""`python -m deploy COMMAND`: a cluster on EC2 by one command; `python -m deploy --help` lists them all.

Status 0: done. 1: a command failed, or a wait was in vain. 2: something has to be changed first; one line says what.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as `python deploy/preflight.py` has it

INSTALL = "python -m pip install -r deploy/requirements.txt"


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}: `{self.prog} --help` lists what there is\n")


def _parser() -> Parser:
    parser = Parser("python -m deploy", description="Runs a cluster on EC2.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    plan = "a name in deploy/examples, or a file; left out: the cluster of deploy/terraform/cluster"
    up = command("up", "starts a cluster, or goes on where an earlier start stopped")
    up.add_argument("plan", nargs="?", default="", metavar="PLAN", help=plan)
    up.add_argument("--email", action="append", default=[], help="where the alarm about money writes to (at first)")
    up.add_argument("--images", action="store_true", help="build images with Packer, if there are none")
    up.add_argument("--upgrade", action="store_true", help="move to the version that is checked out")
    up.add_argument("--request-quotas", action="store_true", help="ask AWS for the quotas that are too low")
    up.add_argument("--wait-minutes", type=int, default=30, metavar="N", help="longest wait for the first frames (30)")
    up.add_argument("--no-tunnel", action="store_true", help="do not open TensorBoard at the end")
    up.add_argument(
        "--yes", action="store_true", help="do not ask: neither about the price, nor before a cluster changes"
    )
    command("status", "shows the cluster's hosts, its deadline, and how far it is")
    command("watch", "opens a tunnel to TensorBoard: http://127.0.0.1:6006")
    logs = command("logs", "follows the logs of all hosts, or of one role")
    logs.add_argument("role", nargs="?", default="", choices=("", "replay", "learner", "actor"))
    logs.add_argument("--since", default="10m", metavar="TIME", help="how far back to begin (10m)")
    scale = command("scale", "changes the number of actor hosts")
    scale.add_argument("hosts", type=int, metavar="N")
    down = command("down", "destroys the cluster and its experience; results, keys and images stay")
    for each in (scale, down):
        each.add_argument("--yes", action="store_true", help="do not ask")
    cost = command("cost", "tells the price of a plan")
    cost.add_argument("plan", nargs="?", default="", metavar="PLAN", help=plan)
    cost.add_argument("--frames-per-second", type=float, metavar="N", help="as measured on such a cluster")
    cost.add_argument("--updates-per-second", type=float, metavar="N", help="as measured on such a learner of Ape-X")
    return parser


def main(words: list[str]) -> int:
    """Runs one command; returns the exit status."""
    chosen = _parser().parse_args(words)
    try:
        from aws import AwsError, explain  # noqa: PLC0415
        from commands import cluster_commands, up  # noqa: PLC0415 - they need what INSTALL installs
        from commands.steps import StepError  # noqa: PLC0415
        from tfvars import DeployError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        print(f"cannot {chosen.command}: no module {error.name} in {sys.executable}: {INSTALL}", file=sys.stderr)
        return 2
    run = up.main if chosen.command == "up" else getattr(cluster_commands, chosen.command)
    try:
        run(chosen)
    except AwsError as error:
        print(f"cannot {chosen.command}: {': '.join(explain(error))}", file=sys.stderr)
        return 2
    except DeployError as error:
        print(f"cannot {chosen.command}: {error}", file=sys.stderr)
        return 2
    except StepError as error:
        print(f"{chosen.command} stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{chosen.command} was stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
