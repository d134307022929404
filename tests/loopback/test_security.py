"""Who may call what: every kind of caller at every method, with a key and with TLS, and strangers at each."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from runtime import errors, timeouts
from runtime.cluster.nodes import Death, NodeRegistration
from runtime.commands import SetLevel
from runtime.config import Config, Network
from runtime.process import certificates, keys
from runtime.process.keys import Keys
from runtime.status import Registration
from runtime.types import GATEWAY_GROUPS, GeneratedGroup, GroupRequest, PolicyVersion, SamplingParams
from services.gateway import GatewayService
from services.rpc import contract, security
from services.rpc.client import Channel, Session, call
from services.rpc.generated import common_pb2
from services.rpc.server import Server
from tests.coroutines import driven_by
from tests.loopback.certificate_files import Authority, write_certificates
from tests.loopback.session_peers import frame, replies, run, started

PATIENCE = 30.0
SHORT = 0.5  # seconds, of what cannot come about
SECRET, ANOTHER = bytes(range(32)), bytes(range(1, 33))
ROLES = ("rollout", "gateway", "reward", "reference", "trainer", "critic")
SERVICES = {
    "rollout": "Rollout",
    "gateway": "Gateway",
    "reward": "Reward",
    "reference": "Reference",
    "trainer": "Trainer",
    "critic": "Critic",
}


def holder(party: str, secret: bytes = SECRET, tls: bool = False) -> Keys:
    found = Keys(name=party, secret=secret)
    return replace(found, certificates=certificates.issued(keys.authority(secret), party)) if tls else found


def of_process(name: str, incarnation: int = 0, tls: bool = False) -> Keys:
    return holder(keys.node_agent("a"), tls=tls).of_process(name, incarnation)


CALLERS: Mapping[str, Keys] = {
    "coordinator": holder(keys.COORDINATOR),
    "operator": holder(keys.OPERATOR),
    "agent": holder(keys.node_agent("a")),
    **{role: of_process(f"{role}-0") for role in ROLES},
}


@asynccontextmanager
async def served(own: Keys | None, service: str = "") -> AsyncIterator[tuple[str, list[str]]]:
    """A server of that party, which notes what it is asked and answers nothing useful."""
    asked: list[str] = []

    def handlers_of(owner: str) -> dict[str, Any]:
        def handler(name: str) -> Any:
            def answer(_: Any) -> None:
                asked.append(name)
                raise errors.InvalidMessage("asked")

            return answer

        return {name: handler(name) for of, name in contract.METHODS if of == owner}

    server = Server({owner: handlers_of(owner) for owner in ("Process", service) if owner}, keys=own)
    async with started(server) as address:
        yield address, asked


async def refusal(channel: Channel, path: str) -> str:
    """Why an empty call is refused before anybody looks at it; "" for one that is not."""
    try:
        await channel.grpc.unary_unary(path)(b"", timeout=PATIENCE, metadata=channel.metadata)
    except grpc.aio.AioRpcError as error:
        denied = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
        told = error.details() or ""
        return told if error.code() in denied and "may not speak" not in told else ""
    return ""


SERVED = {
    "coordinator": (CALLERS["coordinator"], "Coordinator", "coordinator"),
    **{role: (CALLERS[role], SERVICES[role], f"{role}-0/0") for role in ROLES},
}
ALLOWED = {
    "Process/Status": {"coordinator", "agent", "operator"},
    "Process/Profile": {"operator"},
    "Coordinator/Register": set(ROLES),
    "Coordinator/Processes": {"coordinator", "agent", "operator"},
    "Coordinator/Watch": {"coordinator", "agent", "operator"},
    "Coordinator/Join": {"agent"},
    "Coordinator/ReportPaths": {"agent"},
    "Coordinator/ReportDeath": {"agent"},
    "Coordinator/Scale": {"operator"},
}
"""Of every other method: the coordinator alone."""


@pytest.mark.parametrize("party", SERVED)
@driven_by(run)
async def test_every_caller_at_every_method(party: str) -> None:
    own, service, called = SERVED[party]
    names = [f"{owner}/{name}" for owner, name in contract.METHODS if owner in ("Process", service)]
    if party != "coordinator":
        names.append(f"{service}/Session")
    async with served(own, service) as (address, asked):
        for who, caller in CALLERS.items():
            async with Channel(address, caller, called) as channel:
                for name in names:
                    before = len(asked)
                    told = await refusal(channel, f"/sluice.v1.{name}")
                    assert (who in ALLOWED.get(name, {"coordinator"})) is not bool(told), (who, name, told)
                    assert not told or len(asked) == before, (who, name)


STRANGERS = {
    "without a key": None,
    "with another run's": holder(keys.COORDINATOR, ANOTHER),
    "a process as the coordinator": Keys(name=keys.COORDINATOR, secret=CALLERS["reward"].secret),
    "the process of its name before": of_process("rollout-0", 1),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("party", ["coordinator", "rollout"])
@driven_by(run)
async def test_a_stranger_at_every_method(party: str, stranger: str) -> None:
    own, service, called = SERVED[party]
    async with served(own, service) as (address, asked), Channel(address, STRANGERS[stranger], called) as channel:
        names = [f"{owner}/{name}" for owner, name in contract.METHODS if owner in ("Process", service)]
        for name in (*names, f"{service}/Session", f"{service}/Unknown"):
            if (stranger, name) != ("the process of its name before", "Coordinator/Register"):
                assert await refusal(channel, f"/sluice.v1.{name}"), name
        assert await refusal(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert not await refusal(channel, "/grpc.health.v1.Health/Check")
        assert not asked


@driven_by(run)
async def test_a_token_shown_to_one_is_of_no_use_with_another() -> None:
    async with served(CALLERS["trainer"], "Trainer") as (address, _):
        for called in ("rollout-0/0", "trainer-0/1", "coordinator"):
            async with Channel(address, CALLERS["coordinator"], called) as channel:
                assert await refusal(channel, "/sluice.v1.Trainer/Export")


@pytest.mark.parametrize("tls", [False, True])
@driven_by(run)
async def test_a_gateway_calls_the_rollout_that_the_coordinator_names_and_generates_alone(tls: bool) -> None:
    gateway, another = of_process("gateway-0", 1, tls), of_process("reward-0", 1, tls)
    coordinator = holder(keys.COORDINATOR)
    token = coordinator.token_of("gateway-0/1", "rollout-0/3")
    prompt = np.array([1, 2], np.int32)
    generate = GroupRequest(group_id=GATEWAY_GROUPS - 5, prompt=prompt, n=1, seed=1, sampling=SamplingParams(max_new_tokens=1))

    async def told(address: str, own: Keys, shown: str) -> list[str]:
        """What the session answers to a call for replies, and to one of the coordinator's."""
        session = Session(Channel(address, own, "rollout-0/3", token=shown), "rollout-0", "Rollout")
        answers = []
        try:
            await session.open(PATIENCE)
            for method, command in (("Generate", generate), ("SetLevel", SetLevel(0))):
                with pytest.raises(errors.SluiceError) as refused:
                    await session.call(method, command, PATIENCE)
                answers.append(str(refused.value))
        finally:
            await session.close()
        return answers

    async with served(of_process("rollout-0", 3, tls), "Rollout") as (address, asked):
        assert await told(address, gateway, token) == ["asked", "gateway-0/1 may not call /sluice.v1.Rollout/SetLevel"]
        assert asked == ["Generate"]
        for own, shown in (
            (gateway, ""),  # its own key says who it is to the coordinator alone
            (gateway, coordinator.token_of("gateway-0/1", "rollout-0/2")),
            (another, coordinator.token_of("reward-0/1", "rollout-0/3")),
        ):
            assert all("may not call" in each or "needs a key" in each for each in await told(address, own, shown)), shown
        assert asked == ["Generate"]


@asynccontextmanager
async def speaking(address: str, own: Keys, called: str, token: str = "") -> AsyncIterator[Any]:
    """The session stream of `own` without `Session`."""
    async with Channel(address, own, called, token=token) as channel:
        rpc = channel.grpc.stream_stream(
            "/sluice.v1.Rollout/Session", common_pb2.CallFrame.SerializeToString, common_pb2.ReplyFrame.FromString
        )(metadata=channel.metadata)
        yield rpc
        rpc.cancel()


def generates(group_id: int, prompt: int, id_: int = 1, **fields: Any) -> common_pb2.Call:
    method = contract.METHODS["Rollout", "Generate"]
    sampling = SamplingParams(max_new_tokens=1)
    command = GroupRequest(group_id=group_id, prompt=np.array([prompt], np.int32), n=1, seed=1, sampling=sampling)
    made = {"id": id_, "method": "Generate", "body": method.request.serialize(command), "key": method.key_of(command)}
    return common_pb2.Call(**made | fields)


async def answered(rpc: Any, *calls: common_pb2.Call, **fields: Any) -> str:
    """The prompt whose reply comes, or why none does."""
    try:
        await rpc.write(frame(*calls, **fields))
        reply = (await replies(rpc, 1))[0]
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    read = contract.METHODS["Rollout", "Generate"].reply.parse
    return reply.error.message if reply.HasField("error") else read(reply.body).payload.decode()


OWN = GATEWAY_GROUPS - 5  # a group of a gateway's
KEY_17, KEY_18 = (generates(group, 0).key for group in (17, 18))
OF_A_GATEWAY: dict[str, tuple[dict[str, Any], ...]] = {
    "a kept answer": ({"group_id": 17, "prompt": 6},),
    "a kept answer, by another group's call": ({"group_id": OWN, "prompt": 6, "key": KEY_17},),
    "a kept answer, by a method of the coordinator's": ({"group_id": 17, "prompt": 6, "method": "CommitWeights"},),
    "an answer for another group": ({"group_id": OWN, "prompt": 6, "key": KEY_18},),
    "a group of the coordinator's": ({"group_id": 18, "prompt": 6, "key": ""},),
    "an evaluation's group": ({"group_id": -1, "prompt": 6},),
    "an acknowledgement": ({"group_id": OWN, "prompt": 6}, {"acknowledged": [KEY_17]}),
    "a withdrawal": ({"group_id": OWN, "prompt": 6, "cancel": True, "key": KEY_17},),
    "a term": ({"group_id": OWN, "prompt": 6}, {"term": 2**62}),
}


@driven_by(run)
async def test_a_gateway_touches_nothing_of_the_coordinators_at_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither answers that are kept for it, nor calls of its, nor the term that is heeded, nor room for what it sends."""
    asked: list[int] = []

    async def generate(request: GroupRequest) -> GeneratedGroup:
        asked.append(int(request.prompt[0]))
        none, version = list[int](), PolicyVersion()
        said = {"group_id": request.group_id, "prompt_tokens": 1, "response_tokens": none, "truncated": 0}
        return GeneratedGroup(**said, oldest=version, newest=version, payload=b"reply to %d" % request.prompt[0])  # type: ignore[arg-type]

    monkeypatch.setattr(contract, "HELD_IN_ALL", 1000)
    rollout, coordinator, gateway = of_process("rollout-0", 3), holder(keys.COORDINATOR), of_process("gateway-0", 1)
    token = coordinator.token_of("gateway-0/1", "rollout-0/3")
    server = Server({"Rollout": {"Generate": generate}}, keys=rollout)
    async with started(server) as address:
        async with speaking(address, gateway, "rollout-0/3", token) as rpc:
            assert await answered(rpc, generates(OWN, 6)) == "reply to 6"
        async with speaking(address, coordinator, "rollout-0/3") as former:
            assert await answered(former, generates(17, 9), term=5) == "reply to 9"
        for what, (call_, *fields) in OF_A_GATEWAY.items():
            async with speaking(address, gateway, "rollout-0/3", token) as rpc:
                told = await answered(rpc, generates(**call_), **(fields[0] if fields else {}))
                assert "gateway-0/1 may not" in told, what
        async with speaking(address, gateway, "rollout-0/3", token) as rpc:
            await rpc.write(frame(generates(OWN, 6, body=bytes(900), more=True)))
            assert await answered(rpc, generates(OWN, 7, 2)) == "reply to 7"
            async with speaking(address, coordinator, "rollout-0/3") as own:
                assert (
                    await answered(own, generates(19, 9, 3, body=bytes(200), more=True), generates(17, 9), term=6)
                    == "reply to 9"
                )
                assert await answered(own, generates(18, 1), term=6) == "reply to 1"
                assert asked == [6, 9, 7, 1], "an answer of the coordinator's was dropped"
                assert "Generate/20/0" in await answered(own, generates(20, 1, key="Generate/21/0"), term=6)
                assert "term" in await answered(own, generates(20, 1), term=6 + 2**32)
        async with speaking(address, coordinator, "rollout-0/3") as own:
            assert await answered(own, generates(20, 1), term=7) == "reply to 1"


REGISTRATION = Registration(role="rollout", name="rollout-0", address="127.0.0.1:1", pid=1, host="a")


@pytest.mark.parametrize(
    ("caller", "method", "said", "refused"),
    [
        (of_process("rollout-0"), "Register", REGISTRATION, ""),
        (of_process("rollout-0"), "Register", replace(REGISTRATION, incarnation=7), "may not speak for rollout-0/7"),
        (of_process("rollout-1"), "Register", REGISTRATION, "rollout-1/0 may not speak for rollout-0/0"),
        (CALLERS["agent"], "Join", NodeRegistration(name="a", address="127.0.0.1"), ""),
        (CALLERS["agent"], "Join", NodeRegistration(name="b", address="127.0.0.1"), "agent/a may not speak for agent/b"),
        (CALLERS["agent"], "ReportDeath", Death(node="b", name="rollout-0"), "agent/a may not speak for agent/b"),
    ],
)
@driven_by(run)
async def test_everybody_speaks_for_themselves(caller: Keys, method: str, said: Any, refused: str) -> None:
    async with served(CALLERS["coordinator"], "Coordinator") as (address, _), Channel(address, caller) as channel:
        with pytest.raises(errors.Forbidden if refused else errors.InvalidMessage, match=refused or "asked"):
            await call(channel, "coordinator", contract.METHODS["Coordinator", method], said)


@driven_by(run)
async def test_nothing_of_a_stranger_is_read() -> None:
    """A body of more than the server takes would be refused as it is read."""
    huge = bytes(65 << 20)
    async with served(CALLERS["rollout"], "Rollout") as (address, _):
        for own, code in (
            (None, grpc.StatusCode.UNAUTHENTICATED),
            (CALLERS["coordinator"], grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            async with Channel(address, own, "rollout-0/0") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    options = [("grpc.max_send_message_length", -1)]
                    async with grpc.aio.insecure_channel(address, options=options) as large:
                        await large.unary_unary("/sluice.v1.Rollout/Generate")(huge, metadata=channel.metadata)
                assert refused.value.code() is code


@driven_by(run)
async def test_a_stranger_asks_for_health_once_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a watch, nor the calls of those who have a key, and a question that never ends is ended."""
    monkeypatch.setattr(security, "STRANGERS", 2)
    monkeypatch.setattr(timeouts, "HANDSHAKE", SHORT)
    async with served(CALLERS["rollout"], "Rollout") as (address, _), grpc.aio.insecure_channel(address) as channel:
        assert "needs a key" in await refusal_of(channel.unary_stream("/grpc.health.v1.Health/Watch")(b""))
        check = "/grpc.health.v1.Health/Check"
        assert not await refusal_of(channel.unary_unary(check)(b""))
        half = [channel.stream_stream(check)() for _ in range(5)]
        ended = [await refusal_of(each) for each in half]
        assert sorted("too many" in each for each in ended) == [False] * 2 + [True] * 3
        assert sum("no request" in each for each in ended) == 2
        assert not await refusal_of(channel.unary_unary(check)(b""))
        async with Channel(address, CALLERS["coordinator"], "rollout-0/0") as own:
            watching = own.grpc.unary_stream("/grpc.health.v1.Health/Watch")(b"", metadata=own.metadata)
            assert (await watching.read()) is not grpc.aio.EOF
            watching.cancel()


@driven_by(run)
async def test_who_listens_in_the_place_of_another_is_shown_no_token() -> None:
    """On loopback too, where each port is everybody's once it is free: without certificates of the run, or with another's."""
    shown: list[str] = []

    class Listener(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
        async def intercept_service(self, go_on: Any, call_: Any) -> Any:
            shown.extend(key for key, _ in call_.invocation_metadata if key == security.HEADER)
            return await go_on(call_)

    agent = keys.holder(Network(), keys.node_agent("a"), SECRET)
    for credentials in (None, security.server_credentials(holder(keys.COORDINATOR, ANOTHER, tls=True))):
        stranger = grpc.aio.server(interceptors=(Listener(),))
        address = "127.0.0.1:0"
        port = stranger.add_secure_port(address, credentials) if credentials else stranger.add_insecure_port(address)
        await stranger.start()
        async with Channel(f"127.0.0.1:{port}", agent) as channel:
            with pytest.raises(errors.SluiceError):
                method = contract.METHODS["Coordinator", "ReportDeath"]
                await call(channel, "coordinator", method, Death(node="a", name="rollout-0"), SHORT)
        await stranger.stop(0)
    assert not shown


async def refusal_of(rpc: Any) -> str:
    try:
        await (rpc if hasattr(rpc, "__await__") else rpc.read())
    except grpc.aio.AioRpcError as error:
        return error.details() or ""
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# TLS.


async def status_of(address: str, caller: Keys | None, called: str = "rollout-0/0", timeout: float = PATIENCE) -> None:
    async with Channel(address, caller, called) as channel:
        await channel.ready("rollout-0", timeout)
        await call(channel, "rollout-0", contract.METHODS["Process", "Status"])


@driven_by(run)
async def test_with_tls_each_end_knows_the_other() -> None:
    async with served(of_process("rollout-0", 3, tls=True)) as (address, asked):
        with pytest.raises(errors.InvalidMessage, match="asked"):
            await status_of(address, holder(keys.COORDINATOR, tls=True), "rollout-0/3")
        assert asked == ["Status"]
        for told, caller, called in (
            ("certificates do not fit", holder(keys.COORDINATOR, ANOTHER, tls=True), "rollout-0/3"),
            ("another process of the run", holder(keys.COORDINATOR, tls=True), "rollout-0/2"),
            ("another process of the run", holder(keys.COORDINATOR, tls=True), "trainer-0/3"),
            ("wants TLS", holder(keys.COORDINATOR), "rollout-0/3"),
        ):
            with pytest.raises(errors.DeadlineExceeded, match=told):
                await status_of(address, caller, called, SHORT)
        assert asked == ["Status"]
    mixed = replace(holder(keys.COORDINATOR), certificates=of_process("gateway-0", 1, tls=True).certificates)
    async with served(of_process("rollout-0", 3, tls=True), "Rollout") as (address, asked):
        with pytest.raises(errors.Forbidden, match="coordinator: its certificate names another process"):
            await status_of(address, mixed, "rollout-0/3")
        async with speaking(address, mixed, "rollout-0/3") as rpc:
            assert "coordinator: its certificate names another process" in await answered(rpc, generates(17, 9), term=1)
        assert not asked
    async with served(of_process("rollout-0")) as (address, _):
        with pytest.raises(errors.DeadlineExceeded, match="does not speak TLS"):
            await status_of(address, holder(keys.COORDINATOR, tls=True), "rollout-0/0", SHORT)


@driven_by(run)
async def test_certificates_of_ones_own_are_renewed_while_connections_stay(tmp_path: Path) -> None:
    """Another authority's: the strictest renewal there is."""
    files = write_certificates(tmp_path / "node", "127.0.0.1")
    caller, own = (replace(each, files=files) for each in (CALLERS["coordinator"], CALLERS["rollout"]))
    former = write_certificates(tmp_path / "former", "127.0.0.1")
    async with served(own) as (address, asked), Channel(address, caller, "rollout-0/0") as connected:
        status = contract.METHODS["Process", "Status"]
        with pytest.raises(errors.InvalidMessage, match="asked"):
            await call(connected, "rollout-0", status)
        await asyncio.to_thread(shutil.copytree, tmp_path / "node", tmp_path / "former", dirs_exist_ok=True)
        write_certificates(tmp_path / "node", "127.0.0.1")
        with pytest.raises(errors.InvalidMessage, match="asked"):
            await call(connected, "rollout-0", status)
        with pytest.raises(errors.InvalidMessage, match="asked"):
            await status_of(address, caller)
        with pytest.raises(errors.DeadlineExceeded, match="certificates do not fit"):
            await status_of(address, replace(caller, files=former), timeout=SHORT)
        assert asked == ["Status"] * 3


@driven_by(run)
async def test_a_certificate_for_another_address_is_refused(tmp_path: Path) -> None:
    authority = Authority()
    here = write_certificates(tmp_path / "here", "127.0.0.1", authority)
    elsewhere = write_certificates(tmp_path / "elsewhere", "127.0.0.7", authority)
    async with served(replace(CALLERS["rollout"], files=elsewhere)) as (address, asked):
        with pytest.raises(errors.DeadlineExceeded, match="its certificate is not for this address"):
            await status_of(address, replace(CALLERS["coordinator"], files=here), timeout=SHORT)
        assert not asked


@driven_by(run)
async def test_what_lies_between_and_ends_tls_is_named() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)  # the beginning of the client's word
        writer.close()

    proxy = await asyncio.start_server(cut, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    with pytest.raises(errors.DeadlineExceeded, match=rf"no connection to {host}:{port}: "):
        await status_of(f"{host}:{port}", holder(keys.COORDINATOR, tls=True), timeout=SHORT)
    proxy.close()
    await proxy.wait_closed()


def test_a_gateways_private_key_is_in_no_file(tmp_path: Path) -> None:
    network = {"security": "tls"}
    given = {"run": {"name": "a", "dir": str(tmp_path)}, "model": {"path": "none"}, "gateway": {}, "network": network}
    gateway = GatewayService(msgspec.convert(given, Config), "gateway-0", 0)
    gateway.keys = of_process("gateway-0", tls=True)
    context = gateway._tls()
    assert context is not None and [path.name for path in tmp_path.rglob("*")] == ["gateways-ca.pem"]


@driven_by(run)
async def test_tls_is_of_version_1_3() -> None:
    own = holder(keys.COORDINATOR, tls=True).certificates
    assert own is not None

    def negotiated(address: str, folder: Path) -> str | None:
        for name, pem in (("ca", own.ca), ("own", own.own), ("key", own.key)):
            (folder / name).write_bytes(pem)
        context = ssl.create_default_context(cafile=str(folder / "ca"))
        context.load_cert_chain(folder / "own", folder / "key")
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), PATIENCE)
        with plain, context.wrap_socket(plain, server_hostname="0.rollout-0.sluice") as tls:
            return tls.version()

    with tempfile.TemporaryDirectory() as folder:
        async with served(of_process("rollout-0", tls=True)) as (address, _):
            assert await asyncio.to_thread(negotiated, address, Path(folder)) == "TLSv1.3"
