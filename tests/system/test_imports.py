"""Imports between the folders of `apexrl/`, each a process or shared by all, and the little that each role loads."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import ROOT

ROOMS = ("acting", "agents", "environments", "learning", "lockstep", "losses", "net", "networks", "replay", "roles",
         "running", "tools")  # fmt: skip
# By room, those that it never imports; lockstep and roles are imported by none. The modules beside the rooms import
# none, but for the flags, the command line and the library.
NEVER = {
    "losses": {*ROOMS} - {"losses"},
    "environments": {*ROOMS} - {"environments"},
    "replay": {*ROOMS} - {"replay"},
    "net": {"acting", "agents", "environments", "learning", "running", "tools"},
    "networks": {"acting", "agents", "environments", "learning", "running", "tools", "net", "replay"},
    "agents": {*ROOMS} - {"agents", "losses", "networks"},
    "acting": {"learning", "running", "tools"},
    "learning": {"acting", "environments", "running", "tools"},
    "running": {"acting", "tools"},
    "config.flags": {*ROOMS} - {"agents"},
    "tools": {"acting", "agents"},
    "lockstep": {"running", "tools"},
    "roles": {"environments", "replay", "lockstep", "tools"},
    "library": {"acting", "lockstep", "roles", "tools"},
    "__main__": {*ROOMS} - {"agents"},
}


ALONE = {"lockstep", "roles"}


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yields what a file imports, wherever in it: a module, and the name that is taken from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", name.name) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names)


def modules() -> dict[str, set[str]]:
    """Returns our modules by name, each with those that it imports."""
    paths = {}
    for path in (ROOT / "apexrl").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        pairs = [(f"{source}.{name}", source) for source, name in imports_of(path)]
        graph[module] = {whole if whole in paths else source for whole, source in pairs} & paths.keys()
    graph["apexrl"] = set()  # it imports its five names when they are asked for
    return graph


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def test_rooms_import_one_way():
    graph = modules()
    assert {room_of(module) for module in graph} == {*ROOMS, ""}
    wrong = [
        (module, other)
        for module, imported in graph.items()
        for other in imported
        if room_of(other) in NEVER.get(room_of(module) or module.removeprefix("apexrl."), ROOMS)
        or (room_of(other) in ALONE and room_of(module) != room_of(other))
    ]
    assert not wrong


def test_an_agent_owns_no_socket_thread_stream_or_file():
    for path in (ROOT / "apexrl" / "agents").glob("*.py"):
        imported = {source for source, _ in imports_of(path)} | {
            f"{source}.{name}" for source, name in imports_of(path)
        }
        owned = {
            "asyncio",
            "concurrent",
            "io",
            "multiprocessing",
            "os",
            "pathlib",
            "queue",
            "socket",
            "threading",
            "zmq",
        }
        assert not {name.split(".")[0] for name in imported} & owned, path
        assert not imported & {"apexrl.networks.device_stream", "apexrl.networks.checkpoint", "apexrl.files"}, path


def test_no_module_imports_itself_through_others():
    list(graphlib.TopologicalSorter(modules()).static_order())


def modules_after(code):
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import replay", {"torch", "gymnasium", "ale_py", "tensorboardX", "cv2", "rich"}),
        # Roles load their parts after the command line is parsed: a misspelt flag is answered at once.
        ("import learner, actor, apexrl.roles.watch, apexrl.__main__", {"torch", "gymnasium", "ale_py", "rich"}),
        ("import apexrl.learning.loop, apexrl.learning.updates.team", {"gymnasium", "ale_py", "cv2", "rich"}),
        (
            "import apexrl.running.launch, apexrl.tools.sweep",
            {"torch", "gymnasium", "ale_py", "cv2", "tensorboardX"},
        ),  # no environment runs there, and no network
        ("import apexrl.running.workers, apexrl.running.trackers", {"torch", "gymnasium"}),
        ("import apexrl.running.environment_play", {"torch", "zmq", "tyro", "rich"}),
        ("import apexrl.running.learners", {"gymnasium", "ale_py", "cv2", "rich"}),
        ("import apexrl.acting.loop, apexrl.running.workers", {"tensorboardX", "cv2"}),
        ("import apexrl.tools.runs, apexrl.tools.compare", {"torch", "gymnasium", "rich"}),
        ("import apexrl.net", {"torch", "gymnasium", "ale_py", "tyro"}),
        ("import apexrl.net.service", {"torch", "gymnasium", "ale_py", "tyro"}),
        ("import apexrl.replay.replay", {"torch", "zmq", "asyncio", "gymnasium", "tyro"}),
        ("import apexrl.tools.keys, apexrl.tools.replay_tool", {"torch", "gymnasium"}),
        ("import apexrl.tools.comparison, apexrl.tools.run_results", {"gymnasium", "ale_py", "matplotlib", "rich"}),
        ("import apexrl.losses.value_learning, apexrl.losses.windows", {"zmq", "gymnasium"}),
        ("import apexrl.environments.vector", {"torch", "zmq"}),
        ("import apexrl.unroll", {"torch", "zmq", "gymnasium"}),
        ("import apexrl.learning.experience.unroll_store", {"zmq", "gymnasium"}),
        ("import apexrl.agents.apex_dqn", {"zmq", "gymnasium", "ale_py"}),
    ],
)
def test_a_role_loads_only_its_own(code, forbidden):
    assert not modules_after(code) & forbidden
