"""`python -m deploy up` in a region where EC2 has no capacity in some zones."""

import pytest

from tests.deploy.clone import CLUSTER, UP

pytestmark = pytest.mark.long("commands for EC2")


def test_without_capacity_up_goes_on_in_the_next_zone_that_offers_all_types(clone):
    """Only before there were actor hosts, and not from a zone that somebody has named."""
    full, chosen = clone.directory / "tools" / "full", clone.cluster / "zone.auto.tfvars"
    full.write_text("us-east-1a us-east-1b")
    printed, called = clone.run(*UP, "--no-tunnel")
    apply = f"terraform {CLUSTER} apply -input=false -auto-approve"
    moves = [
        f"""echo 'availability_zone = "us-east-1{zone}"' > {chosen.relative_to(clone.directory)}""" for zone in "bc"
    ]
    shown = [line[2:] for line in printed.splitlines() if line.startswith("$ ")]
    assert shown[-5:] == [apply, moves[0], apply, moves[1], apply]
    assert [line for line in called if line.startswith(f"terraform {CLUSTER} apply")] == [apply] * 3
    assert clone.said.count("InsufficientInstanceCapacity") == clone.said.count("sufficient g6.xlarge capacity") == 1
    assert "us-east-1c" in chosen.read_text()

    full.write_text("us-east-1c")
    _, called = clone.run(*UP, status=1)
    assert called[-1] == apply and "us-east-1c" in chosen.read_text()
    assert "no capacity in us-east-1c (the cluster's experience is there)" in clone.said.splitlines()[-1]
    clone.run("down", "--yes")
    assert not chosen.exists()

    described = clone.cluster / "terraform.tfvars"
    text = described.read_text()
    described.write_text(f'{text}availability_zone = "us-east-1c"\n')
    full.write_text("us-east-1a us-east-1c")
    chosen.write_text('availability_zone = "us-east-1a"\n')  # of an `up` before somebody named one
    clone.run(*UP, status=1)
    assert not chosen.exists(), clone.said
    assert "(availability_zone names it; without it `up` tries others)" in clone.said.splitlines()[-1]

    described.write_text(text)
    full.write_text(" ".join(f"us-east-1{letter}" for letter in "abcdef"))
    clone.run(*UP, status=1)
    last = clone.said.splitlines()[-1]
    assert "no capacity in us-east-1a, us-east-1b, us-east-1c, us-east-1d, us-east-1f (no other zone offers all" in last
    assert "try again later, or give other learner_instance_types" in last and "`python -m deploy down`" in last
