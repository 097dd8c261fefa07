"""The software of the hosts: images that Packer has made, or a release that each host installs at its first start."""

from typing import Literal, NamedTuple

from deploy.cluster import Cluster
from deploy.place import CHOICE, write_variable
from deploy.preflight import check_images
from deploy.steps import ROOT, DeployError, must_read, run, tell

BUILD_SECONDS = 5400.0
INIT_SECONDS = 900.0
COPY_SECONDS = 600.0


class Software(NamedTuple):
    """A choice between images and a release."""

    kind: Literal["release", "images"]
    version: str
    is_there: bool  # nothing has to be made

    @property
    def release(self) -> str:
        """The version to be installed at the first start, empty with images."""
        return self.version if self.kind == "release" else ""


def choose(cluster: Cluster, images: bool, upgrade: bool) -> Software:
    """Chooses what the hosts start from.

    A release that was chosen before is kept, and images that are there are used. Otherwise it is a release, which takes
    no build but each host some minutes at its start; or images, where somebody wants them.

    Args:
      images: images, even if they have to be built.
      upgrade: a new release, or new images, of what is checked out.
    Raises: DeployError when git cannot tell the version.
    """
    if not upgrade:
        if cluster.release and not images:
            return Software("release", cluster.release, is_there=True)
        if not any(line.cure for line in check_images(cluster._replace(release=""))):
            return Software("images", "", is_there=True)
    version = must_read("git", "describe", "--tags", "--always").strip()
    if not version:
        raise DeployError("git knows no version: check out a commit")
    return Software("images" if images else "release", version, is_there=False)


def provide(software: Software, cluster: Cluster) -> None:
    """Makes what was chosen, and tells Terraform.

    Raises: StepError when a command fails.
    """
    if software.is_there:
        told = f"release {software.version}, as before" if software.release else "the images of this account"
        print(f"\nsoftware: {told}")
        if software.kind == "images" and cluster.release:
            print(f"\n$ rm {CHOICE.relative_to(ROOT)}")
            CHOICE.unlink(missing_ok=True)
        return
    if software.kind == "images":
        build = "two c7i.xlarge for the minutes of their builds, then the snapshots: a few dollars a month"
        tell("The images", build, 'the commands of "To leave nothing behind" in deploy/README.md')
        run("packer", "init", "deploy/packer", seconds=INIT_SECONDS)
        given = ("-var", f"version={software.version}", "-var", f"region={cluster.region}")
        run("packer", "build", *given, "deploy/packer", seconds=BUILD_SECONDS)
    else:
        file = f"build/release-{software.version}.tar"
        target = f"s3://{cluster.results_bucket}/releases/{software.version}.tar"
        tell("The release", "nothing worth a cent", f"`aws s3 rm --region {cluster.region} {target}`")
        run("bash", "deploy/packer/release.sh", software.version, file, seconds=COPY_SECONDS)
        run("aws", "s3", "cp", "--region", cluster.region, file, target, seconds=COPY_SECONDS)
    write_variable(CHOICE, "release" if software.release else "image_version", software.version)
