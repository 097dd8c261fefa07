"""Steps of `python -m deploy`, each alone."""

import pytest

from tests.system.processes import ROOT


def test_a_bucket_of_somebody_else_is_not_used(monkeypatch):
    import boto3
    from botocore.stub import Stubber

    from deploy import up

    s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    monkeypatch.setattr(up, "client", lambda *_: s3)
    asked = {"Bucket": "results", "ExpectedBucketOwner": "123456789012"}
    with Stubber(s3) as stub:
        stub.add_response("head_bucket", {}, asked)
        assert up.bucket_is_ours("results", "us-east-1", "123456789012")
        stub.add_client_error("head_bucket", "404", expected_params=asked)
        assert not up.bucket_is_ours("results", "us-east-1", "123456789012")
        stub.add_client_error("head_bucket", "403", expected_params=asked)
        with pytest.raises(up.DeployError, match="the bucket results is not of account 123456789012"):
            up.bucket_is_ours("results", "us-east-1", "123456789012")


def test_errors_of_a_command_are_heard_and_shown(monkeypatch, capfd):
    """Its output, in which it may ask, goes to the terminal as it is."""
    from deploy import steps

    assert steps.run_and_hear("sh", "-c", "printf 'Enter a value: '; echo no >&2; exit 3", seconds=60.0) == (3, "no\n")
    shown = capfd.readouterr()
    assert shown.err == "no\n" and shown.out.endswith("Enter a value: ")
    assert steps.run_and_hear("true", seconds=60.0) == (0, "")
    with pytest.raises(steps.StepError, match="did not end within 0 s, and was interrupted"):
        steps.run_and_hear("sleep", "60", seconds=0.1)


def test_a_description_that_was_set_aside_comes_back(monkeypatch, tmp_path):
    from deploy import place

    variables = tmp_path / "terraform.tfvars"
    monkeypatch.setattr(place, "VARIABLES", variables)
    monkeypatch.setattr(place, "CHOICE", tmp_path / "software.auto.tfvars")
    monkeypatch.setattr(place, "ZONE", tmp_path / "zone.auto.tfvars")
    place.ZONE.touch()
    monkeypatch.setattr(place, "exists", lambda: False)
    place.describe("smoke")
    variables.write_text(variables.read_text() + "seed = 3\n")
    mine = variables.read_text()
    place.describe("64-actors")
    assert not place.ZONE.exists(), "another cluster begins in the first zone"
    assert variables.read_text() == (ROOT / "deploy" / "examples" / "64-actors.tfvars").read_text()
    place.describe("smoke")
    assert variables.read_text() == mine
