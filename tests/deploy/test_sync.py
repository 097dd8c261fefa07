"""deploy/files/apexrl_host.py as the units start it: a process, against S3 and the Parameter Store over HTTP."""

import os
import stat
import time
from pathlib import Path

import pytest

from apexrl.net.keyring import Keyring
from apexrl.networks.headers import NUMBERED, numbered_checkpoints
from tests.deploy.host_commands import BUCKET, PREFIX
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("commands for EC2")

LARGE_BYTES = 20 * 1024 * 1024  # more than one part of an upload


def make_run(directory):
    """A run directory with a bit of everything, one file large."""
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "tensorboard").mkdir()
    (directory / "checkpoints" / "latest.safetensors").write_bytes(os.urandom(LARGE_BYTES))
    (directory / "tensorboard" / "events.out.tfevents.1").write_bytes(b"figures")
    (directory / "evaluations.csv").write_text("seconds,frames\n1,2\n")
    (directory / "status.json").write_text("{}")


def content_of(directory):
    """The files that a run leaves, by name, without the locks of its processes."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def stored(s3):
    """The content of the bucket: the newest version's id by key."""
    versions = s3.list_object_versions(Bucket=BUCKET).get("Versions", [])
    return {entry["Key"]: entry["VersionId"] for entry in versions if entry["IsLatest"]}


def test_a_host_gets_the_keys_of_its_roles_and_no_others(run_deploy, finish, tmp_path):
    assert run_deploy("keys", "--cluster", "catch", "--region", "us-east-1").returncode == 0
    for role, secrets in (("replay", ["actor", "replay"]), ("learner", ["learner"]), ("actor", ["actor"])):
        directory = tmp_path / role
        directory.mkdir(mode=0o700)
        status, text = finish("keys", directory, role=role)
        assert status == 0, text
        names = [
            *(f"{name}.public" for name in ("replay", "learner", "actor")),
            *(f"{name}.secret" for name in secrets),
        ]
        assert sorted(path.name for path in directory.iterdir()) == sorted(names)
        for name in secrets:
            assert stat.S_IMODE((directory / f"{name}.secret").stat().st_mode) == 0o600
            Keyring(directory, name).close()  # the role opens them like this
        assert not any(path.read_text().strip() in text for path in directory.iterdir())


def test_missing_keys_are_told_with_the_command_that_makes_them(aws, finish, tmp_path):
    """The unit tries again."""
    status, text = finish("keys", tmp_path)
    assert status == 1 and "run python -m deploy keys --cluster catch --region us-east-1" in text, text
    assert not list(tmp_path.glob("*.public"))


def test_what_changed_is_uploaded_and_a_new_host_gets_it_back(bucket, finish, tmp_path):
    run = tmp_path / "run"
    make_run(run)
    (run / "checkpoints" / "latest.safetensors.tmp").write_bytes(b"half")
    (run / "learner.lock").touch()
    assert finish("sync", run)[0] == 0
    expected = {name for name in content_of(run) if not name.endswith((".tmp", ".lock"))}
    first = stored(bucket)
    assert set(first) == {PREFIX + name for name in expected}

    assert finish("sync", run)[0] == 0
    assert stored(bucket) == first, "nothing changed, nothing goes"
    (run / "evaluations.csv").write_text("seconds,frames\n1,2\n3,4\n")
    (run / "checkpoints" / "best.safetensors").write_bytes(b"best")
    assert finish("sync", run)[0] == 0
    changed = {key for key, version in stored(bucket).items() if first.get(key) != version}
    assert changed == {PREFIX + "evaluations.csv", PREFIX + "checkpoints/best.safetensors"}

    another = tmp_path / "another" / "run"
    another.parent.mkdir()
    status, text = finish("restore", another)
    assert status == 0, text
    (run / "checkpoints" / "latest.safetensors.tmp").unlink()
    (run / "learner.lock").unlink()
    assert content_of(another) == content_of(run)
    before = stored(bucket)
    assert finish("sync", another)[0] == 0
    assert stored(bucket) == before, "what came from S3 does not go back"


@pytest.mark.parametrize(("flags", "num_kept"), [("--keep-checkpoints 2", 2), ("--keep-checkpoints 9", 5), ("", 0)])
def test_a_new_host_gets_as_many_numbered_checkpoints_as_are_kept(bucket, finish, tmp_path, flags, num_kept):
    """S3 keeps all. The newest were uploaded last: a run that went back to an earlier one has smaller numbers."""
    run = tmp_path / "run"
    make_run(run)
    for update in (100, 200, 300, 120, 140):
        path = run / "checkpoints" / NUMBERED.format(update)
        path.write_bytes(b"parameters")
        assert finish("sync", run)[0] == 0
        path.unlink()  # the learner has kept newer ones
        if update == 300:
            time.sleep(1.1)  # S3's times are whole seconds
    another = tmp_path / "another" / "run"
    another.parent.mkdir()
    status, text = finish("restore", another, APEXRL_FLAGS=f"--agent apex-dqn {flags}")
    assert status == 0, text
    newest = [140, 120, 300, 200, 100][:num_kept]
    assert [path.name for path in numbered_checkpoints(another)] == [NUMBERED.format(one) for one in sorted(newest)]
    assert content_of(run).items() <= content_of(another).items()
    before = stored(bucket)
    assert finish("sync", another)[0] == 0
    assert stored(bucket) == before


def test_restoring_leaves_a_run_that_is_there_alone(bucket, finish, tmp_path):
    run = tmp_path / "run"
    make_run(run)
    assert finish("sync", run)[0] == 0
    (run / "status.json").write_text('{"newer": true}')
    before = content_of(run)
    assert finish("restore", run)[0] == 0
    assert content_of(run) == before


def test_a_new_run_has_nothing_to_restore(bucket, finish, tmp_path):
    bucket.put_object(Bucket=BUCKET, Key="catch/run-10/status.json", Body=b"{}")
    bucket.put_object(Bucket=BUCKET, Key="pong/run-1/status.json", Body=b"{}")
    status, text = finish("restore", tmp_path / "run")
    assert status == 0, text
    assert not (tmp_path / "run").exists() or not content_of(tmp_path / "run")


def test_a_restore_that_was_cut_off_is_done_again_whole(bucket, finish, tmp_path):
    run = tmp_path / "run"
    make_run(run)
    assert finish("sync", run)[0] == 0
    another = tmp_path / "another" / "run"
    arriving = another.with_name("run.arriving") / "checkpoints"
    arriving.mkdir(parents=True)
    (arriving / "latest.safetensors.0a1B2c3D").write_bytes(b"half")  # as boto3 leaves it
    (arriving / "best.safetensors").write_bytes(b"gone from the bucket meanwhile")
    assert finish("restore", another)[0] == 0
    assert content_of(another) == content_of(run)


def test_names_that_lead_out_of_the_run_are_refused(bucket, finish, tmp_path):
    bucket.put_object(Bucket=BUCKET, Key=f"{PREFIX}../../outside.txt", Body=b"x")
    run = tmp_path / "deep" / "run"
    run.parent.mkdir()
    status, text = finish("restore", run)
    assert status == 1 and "remove it" in text, text
    assert not run.exists() and not list(tmp_path.rglob("outside.txt"))


@pytest.mark.parametrize("command", ["restore", "sync", "finish"])
def test_another_learner_host_than_the_first_has_nothing_to_do_with_the_run(finish, tmp_path, command):
    """Without a bucket each of these would fail, or wait."""
    run = tmp_path / "run"
    if command != "restore":
        make_run(run)
    status, text = finish(command, run, APEXRL_HOST_RANK="1")
    assert status == 0 and f"{command}: nothing to do: the first learner host keeps the run" in text
    assert run.exists() == (command != "restore")


def test_a_bucket_that_is_missing_is_told_and_no_run_begins_without_it(aws, finish, tmp_path):
    """The units try again: a learner must not begin anew because S3 cannot be read."""
    run = tmp_path / "run"
    make_run(run)
    status, text = finish("sync", run)
    assert status == 1 and "4 of 4 files were not uploaded" in text and "NoSuchBucket" in text
    new = tmp_path / "new" / "run"
    new.parent.mkdir()
    status, text = finish("restore", new)
    assert status == 1 and "NoSuchBucket" in text and not new.exists()
    aws.client("s3").create_bucket(Bucket=BUCKET)
    assert finish("sync", run)[0] == 0
    assert len(stored(aws.client("s3"))) == 4


def test_a_file_that_cannot_be_uploaded_stops_no_other(bucket, aws, monkeypatch, tmp_path):
    """Such as one of root's, which the service may not read."""
    monkeypatch.syspath_prepend(ROOT / "deploy" / "files")
    import apexrl_store

    run = {"APEXRL_BUCKET": BUCKET, "APEXRL_CLUSTER": "catch", "APEXRL_RUN": "run-1"}
    for name, value in (aws.environment | run).items():
        monkeypatch.setenv(name, value)
    make_run(tmp_path / "run")
    open_any = Path.open

    def open_others(path, *words, **options):
        if path.name == "evaluations.csv":
            raise PermissionError("not permitted")
        return open_any(path, *words, **options)

    monkeypatch.setattr(Path, "open", open_others)
    with pytest.raises(
        apexrl_store.HostError, match=r"1 of 4 files were not uploaded, the first: evaluations\.csv: not"
    ):
        apexrl_store.sync(tmp_path / "run")
    assert len(stored(bucket)) == 3 and PREFIX + "evaluations.csv" not in stored(bucket)
