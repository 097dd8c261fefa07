"""`apexrl deploy COMMAND`: a cluster on EC2, by the `python -m deploy` of the checkout that this package runs from."""

import sys

from apexrl.config.words import program
from apexrl.extras import HOME
from apexrl.lines import say


def main() -> int:
    """Runs one command; returns the exit status."""
    if not (HOME / "deploy" / "__main__.py").exists():
        fault = "a cluster is made from a checkout, and this is an installed package"
        say(f"cannot deploy: {fault}: say `pip install -e '.[deploy]'` in a checkout", file=sys.stderr)
        return 2
    sys.path.insert(0, str(HOME))  # an editable installation finds apexrl alone
    from deploy.__main__ import main as run  # noqa: PLC0415 - see above

    return run(sys.argv[1:], program())
