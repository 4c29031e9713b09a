"""A newcomer's mistakes with servers on other machines, and on the command line: each message says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from certificates import Certificates
from newcomer import IMPORTS, Table, cases, check, read

from pymoe.remote.encodings import ENCODINGS

BEFORE = """
from pymoe.bench import cli as bench
from pymoe.ep.simulate import cli as simulate
from pymoe.remote import TLS, ExpertServer, cli, connect

b = ExpertBackend("b", nn.Linear(8, 8), args_schema=[BatchTensorProto(8)])

held = []


def free():
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    held.append(one)  # bound, so that no other program takes it; nothing listens
    return one.getsockname()[1]
"""
PLACES: Table = {
    "nobody listens": ("connect(f'127.0.0.1:{free()}', timeout=9)", "nothing listens there: is the server running"),
    "the server has gone": (
        """
with ExpertServer([b]) as server:
    (there,) = connect(server.address, timeout=9, retries=False).backends()
ExpertClient(there, timeout=9)(torch.randn(1, 8))
""",
        "^ServerLost: .*nothing listens there: is the server running",
    ),
    "a backend that a Runtime serves": (
        """
with Runtime([b]):
    ExpertServer([b]).start()
""",
        "^RuntimeError: ExpertServer: backends must not be served by another Runtime, .*: leave the other Runtime out",
    ),
    "a module for a server": (
        "ExpertServer([nn.Linear(8, 8)])",
        r"expected an ExpertBackend to serve, got Linear: make a backend of the module with ExpertBackend\(",
    ),
    "a module alone for a server": ("ExpertServer(nn.Linear(8, 8))", "expected an ExpertBackend to serve, got Linear"),
    "no port": ("connect('127.0.0.1')", "expected HOST:PORT with a port from 1 to 65535, .* got '127.0.0.1'"),
    "a URL": ("connect('http://127.0.0.1:7000')", "expected HOST:PORT .* got 'http://127.0.0.1:7000'"),
    "a server without a port": ("ExpertServer([b], 'localhost')", "expected HOST:PORT .* got 'localhost'"),
    "a port past the last": (
        "ExpertServer([b], '127.0.0.1:99998')",
        "a port from 0 to 65535, .* got '127.0.0.1:99998'",
    ),
    "a port of its own": ("ExpertServer([b], port=7000)", "argument 'port': address='HOST:PORT' has the host and the"),
    "a host of its own": (
        "connect(host='localhost')",
        "argument 'host': address='HOST:PORT' has the host and the port",
    ),
    "a port in use": (
        """
with socket.create_server(("127.0.0.1", 0)) as other:
    ExpertServer([b], f"127.0.0.1:{other.getsockname()[1]}").start()
""",
        "^OSError: cannot listen at 127.0.0.1:[0-9]+: Address already in use",
    ),
    "a web server": (
        """
import http.server
class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
threading.Thread(target=web.serve_forever, daemon=True).start()
connect(f"127.0.0.1:{web.server_port}", timeout=9)
""",
        r"what listens there is not an ExpertServer \(a web server\?\)",
    ),
    "an expert that is not there": (
        """
with ExpertServer([b]) as server:
    connect(server.address, timeout=9).backends("bb")
""",
        r"there is no expert 'bb', only \['b'\]: did you mean 'b'\?",
    ),
}
ACCESS: Table = {
    "open to all": ("ExpertServer([b], '0.0.0.0:0')", r"can reach 0.0.0.0:0: expected tls=TLS\(cert, key\), got None"),
    "another token": (
        """
with ExpertServer([b], token="right") as server:
    connect(server.address, token="wrong", timeout=9)
""",
        r"^PermissionError: .*a token is needed, got another one: give connect\(\) or a command the token",
    ),
    "no token": (
        """
with ExpertServer([b], token="right") as server:
    connect(server.address, timeout=9)
""",
        r"^PermissionError: .*a token is needed, got none: give connect\(\) token=, or a command --token-file",
    ),
    "no TLS where it is needed": (
        """
with ExpertServer([b], "localhost:0", tls=certificates.server()) as server:
    connect(server.address, timeout=9)
""",
        r"does the server use TLS\? \(tls=TLS\(ca=\), --tls-ca\)",
    ),
    "TLS where there is none": (
        """
with ExpertServer([b], "localhost:0") as server:
    connect(server.address, timeout=9, tls=certificates.client())
""",
        r"does the server use TLS\? Without it, connect without tls=",
    ),
    "another authority": (
        """
with ExpertServer([b], "localhost:0", tls=certificates.server()) as server:
    connect(server.address, timeout=9, tls=TLS(ca=certificates.file("strange-ca.crt")))
""",
        r"TLS\(ca=\), --tls-ca, must hold the authority that signed the server's certificate",
    ),
    "a certificate of another name": (
        """
tls = TLS(certificates.file("127.0.0.1.crt"), certificates.file("127.0.0.1.key"))
with ExpertServer([b], "localhost:0", tls=tls) as server:
    connect(server.address, timeout=9, tls=certificates.client())
""",
        "connect by a name that is in the server's certificate",
    ),
    "a flag for TLS": ("connect('localhost:7000', tls=True)", r"tls must be None or a TLS, got True: TLS\(cert, key\)"),
    "a certificate that is not there": (
        "connect('localhost:7000', tls=TLS(ca='missing.pem'))",
        "No such file or directory: 'missing.pem'",
    ),
    "a line end": (
        "connect('localhost:7000', token='one\\n')",
        r"without spaces, at least one; strip\(\) the line end",
    ),
    "compression": ("connect('localhost:7000', compression='int8')", r"'compression': did you mean 'encoding'\?"),
    "an encoding": (
        "connect('localhost:7000', encoding='int4')",
        f"must be one of {', '.join(map(repr, ENCODINGS))}, got 'int4'",
    ),
    "a folder that cannot be written": (
        "ExpertServer([b], checkpoints='/proc/none')",
        "^OSError: 'b' cannot be saved in /proc/none",
    ),
}
COMMANDS: Table = {
    "a port for serve": (
        "cli.main(['serve', 'a:b', '--port', '1'])",
        "--listen HOST:PORT.*unrecognized arguments: --port",
    ),
    "an option": (
        "cli.main(['info', 'localhost:7000', '--tlsca', 'x'])",
        r"unrecognized arguments: --tlsca x: did you mean '--tls-ca'",
    ),
    "an option with its value": (
        "cli.main(['info', 'localhost:7000', '--time-out=3'])",
        r"unrecognized arguments: --time-out=3: did you mean '--timeout'\?",
    ),
    "a token in a command": (
        "cli.main(['serve', 'a:b', '--token', 'SECRET'])",
        "unrecognized arguments: --token SECRET: did you mean '--token-file'",
    ),
    "a command": ("cli.main(['server', 'a:b'])", r"invalid choice: 'server' .*: did you mean 'serve'\?"),
    "no function": ("cli.main(['serve', 'served'])", "expected MODULE:FUNCTION, got 'served'$"),
    "a module that is not there": ("cli.main(['serve', 'nomodule:make'])", "No module named 'nomodule'$"),
    "a function that is not there": ("cli.main(['serve', 'json:make'])", "there is no function 'make' in json$"),
    "a port past the last, before experts are made": (
        "cli.main(['serve', 'json:loads', '--listen', '127.0.0.1:99999'])",
        "^python -m pymoe.remote serve: --listen: expected .* a port from 0 to 65535, .* got '127.0.0.1:99999'$",
    ),
    "nobody there": ("cli.main(['info', f'127.0.0.1:{free()}'])", "nothing listens there: is the server running"),
    "an option of simulate": ("simulate.main(['simulate', '--rank', '2'])", r"--rank 2: did you mean '--ranks'\?"),
    "sizes without a model": (
        "simulate.main(['simulate', '--experts', '4', '--choices', '8'])",
        "expected --model, or all of --hidden, --ffn, --experts, --choices, got no --hidden, --ffn: --model qwen3-30b",
    ),
    "loads of another kind": (
        "simulate.main(['simulate', '--load', __import__('pymoe').__file__])",
        r"expected a file of recorded loads \(.npz\), as LoadRecorder.save writes it, got another kind of file",
    ),
    "an option of bench": ("bench.main(['run', '--qick'])", r"arguments: --qick: did you mean '--quick'\?"),
    "a command of bench": ("bench.main(['rnu'])", r"invalid choice: 'rnu' .*did you mean 'run'\?"),
}


@cases(PLACES | ACCESS | COMMANDS)
def test_the_message_says_what_to_do(
    capfd: pytest.CaptureFixture[str], code: str, answer: str, certificates: Certificates
) -> None:
    check(read(capfd, BEFORE, code, certificates=certificates), answer)


def test_grpc_says_nothing_of_its_own(certificates: Certificates) -> None:
    """Its lines on stderr, "E1123 10:33:01.2 4711 add_port.cc:83] ...", stood before or instead of the message. They
    are off unless gRPC was loaded before ``pymoe.remote`` or the environment asks for them.
    """
    stranger = f"TLS(ca={certificates.file('strange-ca.crt')!r})"
    code = ACCESS["another authority"][0].replace('TLS(ca=certificates.file("strange-ca.crt"))', stranger)
    own = f"TLS({certificates.file('server.crt')!r}, {certificates.file('server.key')!r})"
    code = BEFORE + code.replace("certificates.server()", own)
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    for verbosity, silent in (({}, True), ({"GRPC_VERBOSITY": "INFO"}, False)):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS + code], capture_output=True, text=True, env=environment | verbosity
        )
        assert "must hold the authority that signed" in done.stderr, done.stderr
        assert (re.search(r"^[EIW]\d{4} ", done.stderr, re.MULTILINE) is None) == silent, done.stderr


def test_what_an_expert_says_gets_no_advice_about_connections(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
class Asks(nn.Module):
    def forward(self, x):
        raise RuntimeError("the database: Connection refused")

asks = ExpertBackend("asks", Asks(), args_schema=[BatchTensorProto(8)], outputs_schema=BatchTensorProto(8))
with ExpertServer([asks]) as server, connect(server.address, timeout=9) as there:
    ExpertClient(*there.backends())(torch.randn(1, 8))
"""
    said = read(capfd, BEFORE, code)
    check(said, "^RuntimeError: .*the database: Connection refused")
    assert "nothing listens" not in said, said
