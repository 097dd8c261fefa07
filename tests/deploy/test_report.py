"""The page about a first cluster: its commands only read, and what they collect holds nothing that is private."""

import re
import subprocess

from tests.system.processes import ROOT

PAGE = (ROOT / "docs" / "ec2-report.md").read_text()
SCRIPT = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[-1]
SAYS = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLED"
case "$*" in *text*InstanceId*) echo i-1 i-2; exit ;; esac
echo "PASS  credentials: account 123456789012 as user/you"
echo "arn:aws:sts::123456789012:assumed-role/Admin/you at 10.79.0.10, mail to \\"you@example.com\\""
"""


def test_the_report_has_all_that_the_table_names_and_nothing_private(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("aws", "git", "python", "terraform"):
        (tools / name).write_text(SAYS)
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLED": str(tmp_path / "called")}
    subprocess.run(["bash", "-eu", "-c", SCRIPT], cwd=tmp_path, env=environment, check=True, timeout=60)
    found = {path.name: path.read_text() for path in (tmp_path / "report").iterdir()}
    named = set(re.findall(r"`([a-z]+)`[,| ]", PAGE.partition("| --- |")[2].partition("## ")[0])) - {"up"}
    assert named <= found.keys() | {"down"} and {"console-i-1", "console-i-2"} <= found.keys()
    for text in found.values():
        assert "10.79.0.10" in text and "credentials: account ACCOUNT as user/NAME" in text
        assert not re.search(r"[0-9]{12}|you|@", text), text
    assert (tmp_path / "report.tar.gz").exists()


def test_its_commands_read_only_and_ask_for_no_secret():
    words = re.findall(r"(?:aws (?!--)\w+ |terraform -chdir=\S+ |python -m deploy )([a-z-]+)", SCRIPT)
    reads = ("describe-", "get-console-output", "tail", "state", "plan", "preflight", "status")
    assert len(words) >= 9 and all(word.startswith(reads) for word in words), words
    asked = re.findall(r"aws (?!--)[^\n]*", SCRIPT)
    assert all("--region $REGION" in line for line in asked)
