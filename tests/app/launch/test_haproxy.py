"""Serve's HAProxy as crosskv starts it: nobody else commands it, it listens nowhere else, and it hides no client."""

from __future__ import annotations

import contextlib
import inspect
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from ray.serve._private import constants, haproxy
from ray.serve.config import HTTPOptions

from app.launch import haproxy as own
from app.launch.haproxy import SWITCH, StandIn, haproxy_environment
from app.launch.ports import free_port
from app.launch.surroundings import files
from app.launch.surroundings.folder import LONGEST_BYTES, private_folder
from load_tests.harness.patience import patience, until

PATIENCE_S = 10.0


class IPv6Server(HTTPServer):
    address_family = socket.AF_INET6


class Echo(BaseHTTPRequestHandler):
    """An ingress: well when it is asked for its health, and else answers with the head that it got."""

    def do_GET(self) -> None:
        body = b"success" if self.path == "/-/healthz" else str(self.headers).lower().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def host(request: pytest.FixtureRequest) -> str:
    """`http_options.host`: where HAProxy listens, and the ingress behind it."""
    wanted = getattr(request, "param", "0.0.0.0")
    if wanted == "::1" and not any(a.address == wanted for found in psutil.net_if_addrs().values() for a in found):
        pytest.skip("this machine has no IPv6")
    return own_address() if wanted == "of the network" else wanted


@pytest.fixture
def ingress(host: str) -> Iterator[HTTPServer]:
    server = (IPv6Server if ":" in host else HTTPServer)((host, 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """As a launcher makes it."""
    made = private_folder()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    found = haproxy_environment(folder)
    assert found, "ray[serve] brings HAProxy on Linux"
    return found


def written_by_ray(
    environment: dict[str, str], port: int, servers: list[haproxy.ServerConfig] | None, host: str = "0.0.0.0"
) -> Path:
    """The configuration that Ray's manager of HAProxy would write; `servers` is None before there is an application."""
    path = Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"])
    config = haproxy.HAProxyConfig(
        socket_path=environment["RAY_SERVE_HAPROXY_SOCKET_PATH"],
        server_state_base=environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"],
        server_state_file=environment["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"],
        bufsize=int(environment["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]),
        maxconn=int(environment.get("RAY_SERVE_HAPROXY_MAXCONN", constants.RAY_SERVE_HAPROXY_MAXCONN)),
        http_options=HTTPOptions(host=host, port=port),
        has_received_routes=True,
        has_received_servers=True,
    )
    backends = {}
    if servers is not None:
        backends["http-crosskv"] = haproxy.BackendConfig(
            name="http-crosskv", path_prefix="/", app_name="crosskv", servers=servers
        )
    api = haproxy.HAProxyApi(cfg=config, backend_configs=backends, config_file_path=str(path))
    api._generate_config_file_internal()
    return path


def run(environment: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    limit = 'ulimit -n "$FILES"; exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", limit, "sh", environment["RAY_SERVE_HAPROXY_BINARY_PATH"], *words],
        env={"FILES": str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]), **os.environ, **environment},
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def listening(
    environment: dict[str, str], ingress: HTTPServer, host: str
) -> Iterator[tuple[int, psutil.Process, HTTPServer]]:
    """The port, HAProxy's process, and the ingress behind it, which Ray looks for on 127.0.0.1."""
    servers = [haproxy.ServerConfig(name="ingress", host="127.0.0.1", port=ingress.server_port)]
    with started(environment, servers, host) as (port, process):
        yield port, process, ingress


@contextlib.contextmanager
def started(
    environment: dict[str, str], servers: list[haproxy.ServerConfig] | None, host: str = "0.0.0.0"
) -> Iterator[tuple[int, psutil.Process]]:
    port = free_port()
    process = run(environment, "-db", "-f", str(written_by_ray(environment, port, servers, host)), "-dR")
    deadline = time.monotonic() + patience(PATIENCE_S)
    try:
        while True:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr
            with contextlib.suppress(httpx.TransportError):
                if ask(host, port).status_code == 200 or servers is None:
                    break
            time.sleep(0.05)
        yield port, psutil.Process(process.pid)
    finally:
        process.kill()
        process.communicate()


def ask(host: str, port: int) -> httpx.Response:
    if host == "0.0.0.0":
        host = "127.0.0.1"
    return httpx.get(
        f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/", trust_env=False, timeout=patience(60)
    )


def own_address() -> str:
    """An address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address but loopback")


def test_ray_knows_every_variable(environment: dict[str, str]) -> None:
    source = inspect.getsource(constants) + inspect.getsource(haproxy)
    assert [name for name in environment if name.startswith("RAY_") and f'"{name}"' not in source] == []
    assert '"-f", self.config_file_path' in inspect.getsource(haproxy.HAProxyApi), "how Ray starts the program"


def test_haproxy_listens_at_the_server_s_port_alone_and_this_user_commands_it(
    listening: tuple[int, psutil.Process, HTTPServer], environment: dict[str, str]
) -> None:
    port, process, _ = listening
    found = {
        one.laddr.port
        for member in (process, *process.children(recursive=True))
        for one in member.net_connections(kind="tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert found == {port}
    assert Path(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).stat().st_mode & 0o077 == 0


def test_a_client_of_another_machine_is_named_and_a_local_one_stays_local(
    listening: tuple[int, psutil.Process, HTTPServer],
) -> None:
    port, *_ = listening
    address = own_address()
    assert "x-forwarded-for" not in httpx.get(f"http://127.0.0.1:{port}/", trust_env=False, timeout=patience(60)).text
    assert (
        f"x-forwarded-for: {address}"
        in httpx.get(f"http://{address}:{port}/", trust_env=False, timeout=patience(60)).text
    )


@pytest.mark.parametrize("host", ["::1"], indirect=True)
def test_who_comes_by_ipv6_from_this_machine_is_local_too(listening: tuple[int, psutil.Process, HTTPServer]) -> None:
    port, *_ = listening
    assert "x-forwarded-for" not in ask("::1", port).text


@pytest.mark.parametrize("host", ["of the network", "::1"], indirect=True)
def test_the_ingress_is_found_on_the_address_that_it_listens_on(
    listening: tuple[int, psutil.Process, HTTPServer], host: str
) -> None:
    port, *_ = listening
    assert ask(host, port).status_code == 200


def test_two_servers_of_one_machine_do_not_answer_for_each_other() -> None:
    """Serve's own proxy, where HAProxy sends what finds no ingress, shares its port with others of the same user."""
    folders = [private_folder() for _ in range(3)]
    try:
        ports = {haproxy_environment(folder)["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] for folder in folders}
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    assert len(ports) == 3


def test_it_starts_where_few_files_may_be_opened(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ingress: HTTPServer, host: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (files.FEWEST, files.FEWEST))
        environment = haproxy_environment(folder)
    servers = [haproxy.ServerConfig(name="ingress", host="127.0.0.1", port=ingress.server_port)]
    with started({**environment, "FILES": str(files.FEWEST)}, servers, host) as (port, _):
        assert ask(host, port).status_code == 200


def test_its_sockets_fit_into_the_longest_private_folder(environment: dict[str, str], folder: Path) -> None:
    longest = folder.with_name(folder.name + "x" * (LONGEST_BYTES - len(os.fsencode(folder))))
    config = written_by_ray(environment, free_port(), [])
    text = config.read_text().replace(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"], f"{longest}/haproxy/{'0' * 56}/s")
    config.write_text(text)
    longest.joinpath("haproxy", "0" * 56).mkdir(parents=True)
    try:
        checked = run(environment, "-c", "-f", str(config))
        assert checked.wait(patience(PATIENCE_S)) == 0, checked.stderr
    finally:
        shutil.rmtree(longest)


def test_before_there_is_an_application_clients_are_told_to_come_again(environment: dict[str, str]) -> None:
    with started(environment, None) as (port, _):
        answer = ask("127.0.0.1", port)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "service_unavailable"


def test_the_head_of_a_request_cannot_take_for_ever(environment: dict[str, str], ingress: HTTPServer) -> None:
    config = written_by_ray(environment, free_port(), [])
    checked = run(environment, "-c", "-f", str(config))
    assert checked.wait(patience(PATIENCE_S)) == 0, checked.communicate()
    assert "timeout http-request 30s" in config.read_text()


def test_without_an_ingress_clients_are_told_to_come_again(
    listening: tuple[int, psutil.Process, HTTPServer],
) -> None:
    port, _, ingress = listening
    ingress.shutdown()
    ingress.server_close()
    answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False, timeout=patience(PATIENCE_S))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "service_unavailable"


def test_a_head_of_many_bytes_passes(listening: tuple[int, psutil.Process, HTTPServer]) -> None:
    port, *_ = listening
    head = {"x-long": "a" * 40_000}
    assert (
        httpx.get(f"http://127.0.0.1:{port}/", headers=head, trust_env=False, timeout=patience(60)).status_code == 200
    )


def test_a_dead_haproxys_place_is_taken_until_ray_starts_another_one(
    environment: dict[str, str], folder: Path, ingress: HTTPServer
) -> None:
    servers = [haproxy.ServerConfig(name="ingress", host="127.0.0.1", port=ingress.server_port)]
    stand_in = StandIn(folder)
    stand_in.look()  # nothing was started yet
    with contextlib.closing(stand_in), started(environment, servers) as (port, of_ray):
        stand_in.look()
        assert stand_in.process is None
        of_ray.kill()

        def answers() -> bool:
            stand_in.look()
            with contextlib.suppress(httpx.TransportError):
                return ask("0.0.0.0", port).status_code == 200
            return False

        until(answers, "another one answers", PATIENCE_S)
        process = stand_in.process
        assert process is not None
        socket_path = Path(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"])
        with socket.socket(socket.AF_UNIX) as asks, pytest.raises(ConnectionRefusedError):
            asks.connect(str(socket_path))  # else Ray took its own for well

        written = written_by_ray(environment, port, servers)
        with httpx.Client(trust_env=False, timeout=patience(60)) as client:
            assert client.get(f"http://127.0.0.1:{port}/").status_code == 200
            rays = run(environment, "-db", "-f", str(written), "-dR")

            def is_gone() -> bool:
                stand_in.look()
                return process.poll() is not None

            until(is_gone, "the stand-in has ended", PATIENCE_S)
        assert ask("0.0.0.0", port).status_code == 200
        stand_in.look()
        assert stand_in.process is None
        rays.kill()
        rays.communicate()


@pytest.mark.parametrize("name", [*own.DECODED, "X_Session_ID", "serve_multiplexed_model_id", "X-Request-Id"])
def test_bytes_that_serve_cannot_decode_are_400_in_words(
    listening: tuple[int, psutil.Process, HTTPServer], name: str
) -> None:
    port, *_ = listening
    for value, status in ((b"\xff", 400), (b"a\xe9b", 400), (b"abc ~", 200)):
        answer = httpx.get(
            f"http://127.0.0.1:{port}/", headers=[(name.encode(), value)], trust_env=False, timeout=patience(60)
        )
        assert answer.status_code == status, (value, answer.text)
        assert status == 200 or answer.json()["error"]["code"] is None
    both = [(name.encode(), b"abc"), (name.encode(), b"\xff")]
    assert (
        httpx.get(f"http://127.0.0.1:{port}/", headers=both, trust_env=False, timeout=patience(60)).status_code == 400
    )


def test_bytes_in_any_other_header_pass(listening: tuple[int, psutil.Process, HTTPServer]) -> None:
    port, *_ = listening
    for name in (b"x-title", b"not-x-request-id", b"x-request-id-too"):
        head = [(name, b"\xff x-request-id: \xff"), (b"x-request-id", b"abc")]
        assert (
            httpx.get(f"http://127.0.0.1:{port}/", headers=head, trust_env=False, timeout=patience(60)).status_code
            == 200
        )


@pytest.mark.parametrize("name", [*own.ORDERS, "X_Request_Disconnect_Disabled"])
def test_what_serve_would_obey_does_not_reach_it(listening: tuple[int, psutil.Process, HTTPServer], name: str) -> None:
    port, *_ = listening
    answer = httpx.get(
        f"http://127.0.0.1:{port}/", headers={name: "1", "x-request-id": "abc"}, trust_env=False, timeout=patience(60)
    )
    assert answer.status_code == 200
    assert name.lower() not in answer.text
    assert "x-request-id: abc" in answer.text


def test_ray_contract_the_headers_that_serve_decodes() -> None:
    decoded = {constants.SERVE_HTTP_REQUEST_ID_HEADER, constants.SERVE_SESSION_ID, constants.SERVE_MULTIPLEXED_MODEL_ID,
               constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
               constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER, "traceparent", "tracestate"}  # fmt: skip
    assert {name.replace("_", "-") for name in decoded} == set(own.DECODED)


def test_a_user_may_keep_serves_own_proxy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert haproxy_environment(folder) == {}


def test_where_there_is_no_haproxy_serves_own_proxy_is_used(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(own, "get_haproxy_binary", none)
    assert haproxy_environment(folder) == {}
