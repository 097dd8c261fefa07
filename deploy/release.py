"""A release in the results bucket, which hosts without images of their own install at their first start."""

from aws import AwsError, client, code_of
from cluster import Cluster


def check_release(cluster: Cluster) -> tuple[str, str]:
    """Returns the finding about the cluster's release, and the cure where it is missing, else an empty text."""
    key = f"releases/{cluster.release}.tar"
    cure = "`python -m deploy up --upgrade` puts the version that is checked out there"
    if not cluster.results_bucket:
        return f"there is no results bucket for {key} yet", cure
    try:
        client("s3", cluster.region).head_object(Bucket=cluster.results_bucket, Key=key)
    except AwsError as error:
        if code_of(error) not in ("403", "404"):
            raise
        return f"s3://{cluster.results_bucket}/{key} is not there", cure
    return f"{cluster.release}, which hosts install at their first start", ""
