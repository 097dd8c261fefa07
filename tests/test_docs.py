"""The documentation: the site builds without a complaint or a network, and tells every flag and every metric."""

import dataclasses
import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apexrl.__main__ import COMMANDS
from apexrl.config.commands import ActorCommand, OfflineCommand, ReplayCommand, RunCommand
from apexrl.config.flags import default_command
from apexrl.config.words import flag_of
from apexrl.learning.record.metric_texts import TEXTS
from benchmarks import charts
from deploy import reference
from deploy.flags import agents
from tests.system.processes import ROOT

FOREIGN = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*")
PARAGRAPH, CODE = re.compile(r"<p>(.*?)</p>", re.DOTALL), re.compile(r"<code>.*?</code>", re.DOTALL)
LIST_OR_TABLE = re.compile(r"(?m)^\s*(?:[*-] |\d+\. |\|)")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--config-file", "docs/site/mkdocs.yml", "--site-dir"]
    result = subprocess.run(
        [sys.executable, "-m", *command, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return directory


def flags_in(config: Any) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        yield from flags_in(value) if dataclasses.is_dataclass(value) else [flag_of(field.name)]


def test_every_flag_and_every_command_is_on_its_page(site):
    told = set(re.findall(r"(?m)^\| `(--[a-z-]+)` \|", (ROOT / "docs/flags.md").read_text()))
    for agent in agents():
        for command in (RunCommand, ActorCommand, OfflineCommand, ReplayCommand):
            assert set(flags_in(default_command(command, agent))) <= told
    page = (site / "flags.html").read_text()
    for name in set(COMMANDS) - {"train", "actor", "learner", "replay", "resume"}:
        assert f"apexrl {name} " in page.partition('id="the-other-commands"')[2], name


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_lists_are_those_of_the_code(page):
    assert page.read_text() == reference.text_of(page), "python -m deploy flags writes it anew"


def test_every_metric_is_on_its_page(site):
    page = html.unescape((site / "metrics.html").read_text())
    for metric in TEXTS:
        assert f"<code>{metric.tag}</code>" in page
        assert metric.text in page


def test_the_python_page_has_the_docstrings(site):
    page = (site / "api.html").read_text()
    for name in ("library.train", "library.load", "library.Run", "library.Agent.act", "agents.contract.Family",
                 "net.insert_client.InsertClient.insert", "net.replay_client.ReplayClient.sample"):  # fmt: skip
        assert f'id="apexrl.{name}"' in page, name


def test_pages_fetch_nothing_and_show_lists_and_tables_as_such(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for path in pages:
        text = path.read_text()
        assert not FOREIGN.findall(text), path
        for paragraph in PARAGRAPH.findall(text):
            assert not LIST_OR_TABLE.search(CODE.sub("", paragraph)), (path, paragraph)


def test_a_search_and_the_menu_lead_to_pages_for_readers(site):
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert {"not-learning.html", "environments.html", "screen.html"} < found
    assert not [location for location in found if location.startswith(("log/", "results/"))]
    assert 'href="log/' not in (site / "index.html").read_text()


def test_the_page_of_benchmarks_says_what_its_chart_shows():
    pages = [(ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "log/replay.md")]
    for bars in charts.speeds():
        for system, values in bars.values.items():
            for value in values.values():
                assert any(re.search(rf"(?<![\d,]){value:,.0f}(?![\d,]*\d)", page) for page in pages), (
                    bars.title,
                    system,
                )


def test_tests_that_a_page_names_are_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs/service.md").read_text()))
    assert len(named) > 10 and all((ROOT / path).is_file() for path in named), named
