"""Tests that the files in deploy/ fit the server: its command line, probes and metrics, and how long it takes to end.

systemd's own check verifies the unit where it is installed. Nothing builds the image here, which needs a container
registry (docs/tutorials/service.md says what was built by hand): the test compares the container file with the tree,
and has setup.py read the files that it copies.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from experts import mlp
from limits import LONG

from pymoe.remote import TLS, ExpertServer, cli, connect
from pymoe.remote.server import CHECK_SIGNALS_S, LAST_REPLIES_S, PATIENCE_S
from pymoe.remote.service import CUT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HEALTH = DEPLOY / "health.py"
COMMAND = ["python", "-m", "pymoe.remote", "serve"]
yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers (requirements-dev.txt)")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], argparse.Namespace]:
    """Return what the real parser makes of arguments of ``serve``."""
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli, "serve", lambda options: seen.append(options) or 0)

    def parse(arguments: list[str]) -> argparse.Namespace:
        assert cli.main(["serve", *arguments]) == 0
        return seen[-1]

    return parse


def longest_end(grace: float) -> float:
    """Return the seconds after a signal in which a server has ended, even with an expert that hangs."""
    return CHECK_SIGNALS_S + grace + CUT_S + max(grace, 1.0) + LAST_REPLIES_S + max(grace, PATIENCE_S)


# --- systemd ---


def unit_settings() -> list[tuple[str, str]]:
    text = (DEPLOY / "pymoe-experts.service").read_text().replace("\\\n", "")
    return re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)


def test_the_unit_starts_a_server_and_lets_it_end(parsed: Callable[[list[str]], argparse.Namespace]) -> None:
    settings = unit_settings()
    of = dict(settings)
    _, *words = shlex.split(of["ExecStart"])
    assert words[:3] == COMMAND[1:]
    options = parsed(words[3:])
    credentials = {value.split(":")[0] for name, value in settings if name == "LoadCredential"}
    files = {options.tls_cert, options.tls_key, options.token_file}
    assert files == {Path("%d") / name for name in credentials}
    assert options.checkpoints == Path("%S") / of["StateDirectory"]
    assert float(of["TimeoutStopSec"]) > longest_end(options.grace)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    def fault(text: str) -> str:
        unit = tmp_path / "pymoe-experts.service"
        unit.write_text(text.replace("/opt/pymoe/bin/python", sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
        return done.stderr

    text = (DEPLOY / "pymoe-experts.service").read_text()
    assert "'RestartSecs'" in fault(text.replace("RestartSec=", "RestartSecs="))
    assert fault(text) == ""


# --- Kubernetes ---


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["StatefulSet"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (one,) = pod["containers"]
    return one


def test_the_parts_of_the_manifest_find_each_other(
    manifest: dict[str, Any], pod: dict[str, Any], container: dict[str, Any]
) -> None:
    service, stateful = manifest["Service"], manifest["StatefulSet"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == stateful["selector"]["matchLabels"] == labels
    assert stateful["serviceName"] == service["metadata"]["name"]
    assert {one["targetPort"] for one in service["spec"]["ports"]} == {one["name"] for one in container["ports"]}
    volumes = {one["name"] for one in pod["volumes"]}
    claims = {one["metadata"]["name"] for one in stateful["volumeClaimTemplates"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes | claims
    (config,) = [one["configMap"]["name"] for one in pod["volumes"] if "configMap" in one]
    assert config == manifest["ConfigMap"]["metadata"]["name"]


def test_the_pod_starts_a_server_and_lets_it_end(
    pod: dict[str, Any], container: dict[str, Any], parsed: Callable[[list[str]], argparse.Namespace]
) -> None:
    options = parsed(container["args"])
    assert {f":{one['containerPort']}" for one in container["ports"]} == {options.listen[options.listen.index(":") :]}
    mounts = {Path(one["mountPath"]): one.get("readOnly", False) for one in container["volumeMounts"]}
    secret = [mounts[file.parent] for file in (options.tls_cert, options.tls_key, options.token_file)]
    assert secret == [True] * 3
    assert mounts[options.checkpoints] is False
    assert pod["terminationGracePeriodSeconds"] > longest_end(options.grace)


def test_only_a_hung_server_fails_the_liveness_probe(
    container: dict[str, Any], parsed: Callable[[list[str]], argparse.Namespace]
) -> None:
    options = parsed(container["args"])
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    for probe in probes:
        command = probe["exec"]["command"]
        assert command[:3] == ["python", "/opt/pymoe/health.py", f"localhost:{container['ports'][0]['containerPort']}"]
        (seconds,) = [word.removeprefix("--timeout=") for word in command if word.startswith("--timeout=")]
        assert float(seconds) < probe["timeoutSeconds"]
        assert f"--tls-ca={options.tls_cert.parent}/ca.crt" in command
    liveness = probes[2]
    assert liveness["periodSeconds"] * (liveness["failureThreshold"] - 1) > longest_end(options.grace)


class Started:
    """The server that the manifest starts, on free ports, with its mounts in ``folder``."""

    def __init__(self, manifest: dict[str, Any], container: dict[str, Any], certificates: Certificates, folder: Path):
        for mount in container["volumeMounts"]:
            (folder / mount["name"]).mkdir()
        (folder / "experts" / "experts.py").write_text(manifest["ConfigMap"]["data"]["experts.py"])
        for name, file in (("tls.crt", "server.crt"), ("tls.key", "server.key"), ("ca.crt", "ca.crt")):
            shutil.copy(certificates.file(file), folder / "secrets" / name)
        (folder / "secrets" / "token").write_text("correct-horse")
        with socket.create_server(("127.0.0.1", 0)) as one:
            self.metrics = one.getsockname()[1]
        self.folder, self.said = folder, ""
        self.mounts = {one["mountPath"]: str(folder / one["name"]) for one in container["volumeMounts"]}
        self.ports = {"7000": "0", "9100": str(self.metrics)}
        words = [self.here(word) for word in container["args"]]
        self.process = subprocess.Popen(
            [sys.executable, *COMMAND[1:], *words],
            cwd=folder / "experts", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.ports["7000"] = self.until(r"serving at 0\.0\.0\.0:(\d+)")

    def here(self, word: str) -> str:
        """Return an argument of the manifest with this machine's folders and ports."""
        word = re.sub(r"(^|(?<==))(/\w+)(?=/|$)", lambda found: self.mounts[found[2]], word)
        return re.sub(r"(?<=[:=])(7000|9100)$", lambda found: self.ports[found[0]], word)

    def until(self, pattern: str) -> str:
        """Read the server's output until a line matches, and return the first group."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(self.said)

    def probe(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        _, _, *words = command
        words = [self.here(word) for word in words]
        return subprocess.run([sys.executable, str(HEALTH), *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def started(
    manifest: dict[str, Any],
    container: dict[str, Any],
    certificates: Certificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Started]:
    one = Started(manifest, container, certificates, tmp_path_factory.mktemp("pod"))
    yield one
    one.process.kill()
    one.process.wait()


@pytest.mark.slow
def test_the_pods_server_answers_its_probes_and_drains(started: Started, container: dict[str, Any]) -> None:
    command = container["livenessProbe"]["exec"]["command"]
    done = started.probe(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"localhost:\d+ serves\n", done.stdout)
    with urllib.request.urlopen(f"http://127.0.0.1:{started.metrics}/metrics") as page:
        assert b'pymoe_remote_expert_updates{expert="sorter"' in page.read()
    there = connect(
        f"localhost:{started.ports['7000']}",
        tls=TLS(ca=started.folder / "secrets" / "ca.crt"),
        token="correct-horse",
    )
    with there:
        assert list(there.info().experts) == ["sorter"]

    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(LONG) == 0, started.said
    assert list((started.folder / "checkpoints").iterdir()), "the drain saves the expert"
    done = started.probe([*command, "--timeout=1"])
    assert done.returncode == 1
    assert "does not answer" in done.stdout


# --- the probe ---


def probe(server: ExpertServer, *options: str) -> tuple[int, str]:
    address = f"localhost:{server.address.rpartition(':')[2]}"
    done = subprocess.run([sys.executable, str(HEALTH), address, *options], capture_output=True, text=True)
    return done.returncode, done.stdout.removeprefix(address).strip()


def test_a_draining_server_is_not_healthy() -> None:
    with ExpertServer(mlp("a")) as server:
        assert probe(server) == (0, "serves")
        server._service.draining = True
        assert probe(server) == (1, "does not serve")


def test_another_authoritys_server_is_not_healthy(certificates: Certificates) -> None:
    with ExpertServer(mlp("a"), tls=certificates.server(), token="correct-horse") as server:
        assert probe(server, f"--tls-ca={certificates.file('ca.crt')}") == (0, "serves")
        status, said = probe(server, f"--tls-ca={certificates.file('strange-ca.crt')}", "--timeout=1")
        assert status == 1
        assert "does not answer" in said


# --- the image ---


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    lines = [line.split(" ", 1) for line in text.splitlines() if line]
    return [(name, words) for name, words in lines]


def copied() -> dict[str, str]:
    """Return the destination of every file or folder of the source tree that the image takes."""
    found = {}
    for name, words in instructions():
        if name == "COPY" and not words.startswith("--from"):
            *sources, destination = words.split()
            found |= dict.fromkeys(sources, destination)
    return found


def test_the_image_runs_the_server_and_holds_the_probe(
    container: dict[str, Any], parsed: Callable[[list[str]], argparse.Namespace]
) -> None:
    (entry,) = [json.loads(words) for name, words in instructions() if name == "ENTRYPOINT"]
    assert entry == ["tini", "--", *COMMAND]
    parsed(["experts:make"])
    assert copied()["deploy/health.py"] in container["readinessProbe"]["exec"]["command"]
    (folder,) = [words for name, words in instructions() if name == "WORKDIR" and words != "/source"]
    assert folder in {one["mountPath"] for one in container["volumeMounts"]}, "modules are found in this folder"


def test_every_stage_of_the_image_exists() -> None:
    froms = [words.split(" AS ") for name, words in instructions() if name == "FROM"]
    stages = {words[1] for words in froms if len(words) > 1}
    for device in ("cpu", "cuda"):
        bases = [words[0].replace("${DEVICE}", device) for words in froms]
        assert all(":" in base or base in stages for base in bases), bases
    from_stage = [words for name, words in instructions() if name == "COPY" and words.startswith("--from=")]
    assert {words.split()[0].removeprefix("--from=") for words in from_stage} <= stages


def test_setup_finds_all_that_it_needs_among_the_files_that_the_image_copies(tmp_path: Path) -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    for source in copied():
        assert f"!{source.split('/')[0]}" in ignored
        if not source.startswith("deploy"):
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path / source)
    (extras,) = [found[1] for _, words in instructions() if (found := re.search(r"'\.\[([\w,]+)\]'", words))]
    done = subprocess.run([sys.executable, "setup.py", "egg_info"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("*.egg-info")
    assert "\n# pymoe\n" in (made / "PKG-INFO").read_text()
    required = (made / "requires.txt").read_text()
    assert all(f"[{extra}]" in required for extra in extras.split(","))
