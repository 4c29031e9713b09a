"""Tests of servers in actors of a local Ray: clients find them by name and follow them through kills and restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import LONG
from torch import nn

import pymoe
from pymoe.integrations import ray as pymoe_ray

pytest.importorskip("grpc", reason="pymoe.remote needs grpcio")

from pymoe.remote import Connection, ExpertServer, cli

WIDTH = 8


def experts_of(name: str) -> Callable[[], Any]:
    """Return a function that Ray sends by value, because the actor's process cannot import this file."""

    def make() -> Any:
        torch.manual_seed(0)
        expert = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(expert.parameters(), 0.1)
        return pymoe.ExpertBackend(name, expert, optimizer, args_schema=[pymoe.BatchTensorProto(WIDTH)])

    return make


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("grpc", reason="pymoe.remote needs grpcio")
    paths = [one for one in sys.path if one]
    environment = {"env_vars": {"PYTHONPATH": ":".join(paths)}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield ray
    ray.shutdown()


def eventually(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_mixture_follows_an_actor_that_is_killed_and_starts_again(ray: Any, tmp_path: Path) -> None:
    actors = {
        name: pymoe_ray.serve(name, experts_of(name), checkpoints=tmp_path, save_every=0.1, num_cpus=1)
        for name in ("left", "right")
    }
    with pymoe_ray.ServedExperts(actors, timeout=LONG) as served:
        mixture = pymoe.MixtureOfExpertBackends(
            served.backends(), top_k=2, forward_timeout=LONG, backward_timeout=LONG, timeout_after_k_min=None
        )
        served.follow(mixture, every=0.1)
        x = torch.randn(16, WIDTH)
        for _ in range(3):
            mixture(x).square().sum().backward()
        left = mixture.backends["left"]
        assert left.updates == 3
        eventually(lambda: ray.get(actors["left"].save.remote()) == 0)  # all of it is saved
        ray.kill(actors["left"], no_restart=False)
        eventually(lambda: not left.get_pools()[0].served)
        mixture(x).sum().backward()  # the mixture continues without the expert
        eventually(lambda: mixture.backends["left"] is not left)
        again = mixture.backends["left"]
        assert again.updates == 3, "from its checkpoint"
        before = mixture.stats()["left"].forward.answered
        mixture(x).sum().backward()
        assert mixture.stats()["left"].forward.answered == before + 1
    for actor in actors.values():
        ray.get(actor.drain.remote())
        ray.kill(actor)


@pytest.mark.slow
def test_a_name_that_is_not_there_and_one_that_is_taken(ray: Any) -> None:
    with pytest.raises(ValueError, match="nobody"):
        pymoe_ray.ServedExperts(["nobody"])
    actor = pymoe_ray.serve("taken", experts_of("e"), num_cpus=1, namespace="ours")
    with pytest.raises(ValueError, match="taken"):
        ray.get(pymoe_ray.serve("taken", experts_of("e"), num_cpus=1, namespace="ours").address.remote())
    ray.kill(actor)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="pip install ray"):
        pymoe_ray.serve("x", experts_of("x"))
    with pytest.raises(ImportError, match="pip install ray"):
        pymoe_ray.ServedExperts(["x"])


ACTOR = """
import sys, threading
from pymoe.integrations import ray as pymoe_ray
sys.path.insert(0, {folder!r})
from test_ray import experts_of
actor = pymoe_ray.ExpertActor(experts_of("e"), "127.0.0.1", {{"checkpoints": {checkpoints!r}}})
print(actor.address(), flush=True)
if "drain" in sys.argv:
    actor.drain()
    print("drained", actor.address(), flush=True)
sys.stdin.read()
"""


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("who", ["a client", "the actor"])
def test_an_actor_whose_server_was_drained_by_the_command_ends(tmp_path: Path, who: str) -> None:
    """The actor stayed alive without a server, so Ray did not restart it."""
    program = ACTOR.format(folder=str(Path(__file__).parent), checkpoints=str(tmp_path))
    paths = [str(Path(__file__).parents[1]), *(one for one in sys.path if one)]
    with subprocess.Popen(
        [sys.executable, "-c", program, *(["drain"] if who == "the actor" else [])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as actor:  # fmt: skip
        assert actor.stdout
        address = actor.stdout.readline().strip()
        if who == "a client":
            assert cli.main(["drain", address, "--timeout", str(LONG)]) == 0
            assert actor.wait(LONG) == 1
            assert list(tmp_path.glob("*/*.safetensors"))
        else:
            assert actor.stdout.readline().split() == ["drained", address]
            actor.communicate()
            assert actor.returncode == 0


def test_the_documented_program_makes_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the program's actors served an expert of the same name, and a mixture accepts no name twice."""
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "remote.md").read_text()
    (program,) = [one for one in page.split("```python\n")[1:] if "pymoe_ray.serve" in one.partition("```")[0]]
    (sorter,) = [one for one in page.split("```python\n")[1:] if "def sorter" in one.partition("```")[0]]
    actors: dict[str, pymoe_ray.ExpertActor] = {}

    def serve(name: str, make: Callable[[], Any], **options: Any) -> None:
        monkeypatch.setattr(pymoe_ray.ExpertActor, "_end_with_server", lambda self: None)
        actors[name] = pymoe_ray.ExpertActor(make, "127.0.0.1", {})

    monkeypatch.setattr(pymoe_ray, "serve", serve)
    monkeypatch.setattr(pymoe_ray.ServedExperts, "_address", lambda _, name, timeout: actors[name].address())
    there: dict[str, Any] = {}
    exec(sorter.partition("```")[0].partition("server =")[0] + program.partition("```")[0], there)
    try:
        assert list(there["mixture"].backends) == [f"sorter-{number}" for number in range(4)]
        assert there["mixture"](torch.randn(4, WIDTH)).shape == (4, WIDTH)
    finally:
        there["served"].close()
        for actor in actors.values():
            actor.drain()


class Moved:
    """Replaces Ray, and holds the current address of each server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **servers: ExpertServer) -> None:
        self.servers = servers
        monkeypatch.setattr(pymoe_ray.ServedExperts, "_address", lambda _, name, timeout: self.servers[name].address)


def server_of(name: str) -> ExpertServer:
    server = ExpertServer(experts_of(name)())
    server.start()
    return server


def test_all_mixtures_follow_a_server_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mixture had its own thread, and only the first thread that saw the new address used it."""
    moved = Moved(monkeypatch, left=server_of("left"))
    with pymoe_ray.ServedExperts(["left"]) as served:
        mixtures = [pymoe.MixtureOfExpertBackends(served.backends(), top_k=1, max_experts=1) for _ in range(2)]
        for mixture in mixtures:
            served.follow(mixture, every=0.02)
        before, moved.servers["left"] = moved.servers["left"], server_of("left")
        before.drain()
        address = moved.servers["left"].address
        eventually(lambda: all(mixture.backends["left"].address == address for mixture in mixtures))
        assert sum(one.name == "pymoe-ray" for one in threading.enumerate()) == 1
    moved.servers["left"].drain()


def test_connections_that_come_to_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a name was missing, connections opened before it stayed open. So did one connection per second while a mixture
    refused the new backends.
    """
    made: list[Connection] = []
    real = pymoe_ray.ServedExperts._connect

    def connect(self: Any, address: str) -> Connection:
        made.append(real(self, address))
        return made[-1]

    monkeypatch.setattr(pymoe_ray.ServedExperts, "_connect", connect)
    moved = Moved(monkeypatch, left=server_of("left"))
    with pytest.raises(KeyError, match="nobody"):
        pymoe_ray.ServedExperts(["left", "nobody"])
    assert [one.closed for one in made] == [True]
    with pymoe_ray.ServedExperts(["left"]) as served:
        mixture = pymoe.MixtureOfExpertBackends(served.backends(), top_k=1, max_experts=1)
        other = pymoe.ExpertBackend("left", nn.Linear(3, 3), args_schema=[pymoe.BatchTensorProto(3)])
        before, moved.servers["left"] = moved.servers["left"], ExpertServer(other)
        with moved.servers["left"]:
            before.drain()
            served._mixtures.append(mixture)
            with pytest.raises(ValueError, match="but the other backends"):
                served._move("left")
            assert [one.closed for one in made] == [True, False, True]
        assert mixture.backends["left"].address == made[1].address
