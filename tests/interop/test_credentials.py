"""Credentials.

Every source that the AWS chain has for a server, what a real store refuses, and what becomes of an
engine whose credentials end: with both transports, on Ceph.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from credential_provider import CredentialProvider, Issued
from typer.testing import CliRunner

from ec_s3.blocking import ECCacheEngine
from ec_s3.cli.app import app
from ec_s3.config import ECConfig
from ec_s3.errors import RemoteDeniedError
from ec_s3.keys import Namespace
from ec_s3.testing.conformance import keys, read
from ec_s3.testing.faults import FaultServer
from ec_s3.testing.servers import Keys
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ec_s3.s3 import S3Store
    from ec_s3.testing.servers.ceph import Ceph

pytestmark = [
    pytest.mark.interop,
    pytest.mark.parametrize("real_server", ["ceph"], indirect=True),
]

SPACE = Namespace(model="org/model", dtype="bfloat16")
HUSH = "HUSHsecretHUSH"
LARGE = 65 << 20  # goes up in parts
WAIT = 60.0
ITEMS = 200


@pytest.fixture
def server(real_server: Ceph) -> Ceph:
    return real_server


@pytest.fixture
def user(server: Ceph) -> Iterator[Keys]:
    """Keys of the buckets' owner that a test may take away."""
    made = new_keys()
    server.grant(made)
    yield made
    server.client().list_buckets()  # the server has survived the test


@pytest.fixture
def place(server: Ceph, real_bucket: str) -> S3Location:
    return S3Location(real_bucket, endpoint=server.endpoint)


@pytest.fixture
def no_keys(server_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what the test provides."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


def new_keys() -> Keys:
    return Keys(f"AK{uuid.uuid4().hex[:16].upper()}", HUSH + uuid.uuid4().hex)


def use(monkeypatch: pytest.MonkeyPatch, who: Keys) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", who.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", who.secret_key)


def write_profile(folder: Path, who: Keys, name: str = "default") -> None:
    (folder / "credentials").write_text(
        f"[{name}]\naws_access_key_id = {who.access_key}\n"
        f"aws_secret_access_key = {who.secret_key}\n"
    )


def for_a_while(who: Keys, seconds: float = 3600) -> Issued:
    return Issued(who.access_key, who.secret_key, time.time() + seconds)


def signers(proxy: FaultServer) -> list[str]:
    """Whose key signed each request, in order."""
    heads = [request.header("Authorization") for request in proxy.log]
    return [head.partition("Credential=")[2].partition("/")[0] for head in heads]


# Where they come from


@pytest.mark.parametrize(
    "source",
    [
        *("environment", "profile", "web identity"),
        pytest.param("container", marks=pytest.mark.smoke),
    ],
)
async def test_each_source_of_the_chain_opens_the_bucket(
    open_store: Callable[..., S3Store],
    server: Ceph,
    place: S3Location,
    source: str,
    no_keys: None,
    isolated_aws: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Keys(server.access_key, server.secret_key)
    with CredentialProvider(lambda: for_a_while(owner)) as provider:
        environment: dict[str, str] = {}
        if source == "environment":
            use(monkeypatch, owner)
        elif source == "profile":
            use(monkeypatch, new_keys())  # a profile that is named goes before these
            write_profile(isolated_aws, owner, "ops")
            place = S3Location(place.bucket, endpoint=place.endpoint, profile="ops")
        elif source == "container":
            environment = provider.container
        else:
            environment = provider.web_identity(isolated_aws / "token")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = open_store(place)
        await store.put("v1/k", [b"x"])
        assert await read(store, "v1/k") == b"x"
        assert await keys(store) == ["v1/k"]
        await store.aclose()
    assert provider.asked == (source in ("container", "web identity"))


async def test_a_session_token_is_sent_and_signed_with_each_request(
    open_store: Callable[..., S3Store],
    server: Ceph,
    place: S3Location,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
    with FaultServer(server.endpoint) as proxy:
        store = open_store(S3Location(place.bucket, endpoint=proxy.url))
        await store.put("v1/k", [b"x"])
        await store.put("v1/large", [bytes(LARGE)])
        assert await read(store, "v1/k") == b"x"
        assert (await keys(store))[0] == "v1/k"
        assert (await store.delete(["v1/k"])).deleted == ("v1/k",)
        await store.aclose()
        for request in proxy.log:
            assert request.header("x-amz-security-token") == "a-session-token"
            assert "x-amz-security-token" in request.header("Authorization")


# Those that end


async def traffic(store: S3Store, until: Callable[[], bool]) -> None:
    """Put and read until something is so."""
    rounds = 0
    async with asyncio.timeout(WAIT):
        while not until():
            body = str(rounds).encode()
            await store.put(f"v1/{rounds}", [body])
            assert await read(store, f"v1/{rounds}") == body
            rounds += 1
            await asyncio.sleep(0.01)


async def test_short_lived_credentials_are_renewed_beside_the_traffic(
    open_store: Callable[..., S3Store],
    server: Ceph,
    place: S3Location,
    no_keys: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [new_keys() for _ in range(4)]
    for each in made:
        server.grant(each)
    turns = itertools.cycle(made)
    with (
        CredentialProvider(lambda: for_a_while(next(turns), 12)) as provider,
        FaultServer(server.endpoint) as proxy,
    ):
        for name, value in provider.container.items():
            monkeypatch.setenv(name, value)
        async with aclosing(open_store(S3Location(place.bucket, endpoint=proxy.url))) as store:
            await store.put("v1/first", [b"x"])
            for _ in range(2):
                before, asked = signers(proxy)[-1], provider.asked
                provider.answers.clear()
                await traffic(store, lambda: provider.asked > asked)  # noqa: B023  # runs here
                # It is asked and does not answer: requests go on with what is held.
                sent = len(proxy.log)
                await traffic(store, lambda: len(proxy.log) > sent + 20)  # noqa: B023  # as above
                assert set(signers(proxy)[sent:]) == {before}
                provider.answers.set()
                await traffic(store, lambda: signers(proxy)[-1] != before)  # noqa: B023  # as above


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_three_minutes_of_traffic_with_credentials_of_a_minute_see_no_refusal_and_no_wait(
    open_store: Callable[..., S3Store],
    server: Ceph,
    place: S3Location,
    no_keys: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server takes each key away when it ends, and the provider takes its time."""
    sent, meanwhile = 0, []

    def issue() -> Issued:
        made, before = new_keys(), sent
        server.grant(made)
        time.sleep(1)  # the SDK waits for two seconds
        meanwhile.append(sent - before)
        return for_a_while(made, 60)

    async def revoke(provider: CredentialProvider) -> None:
        for at in range(10):
            while len(provider.issued) <= at or time.time() < provider.issued[at].ends:  # noqa: ASYNC110  # a clock
                await asyncio.sleep(0.1)
            issued = provider.issued[at]
            ended = Keys(issued.access_key, issued.secret_key)
            await asyncio.to_thread(server.revoke, ended)

    with CredentialProvider(issue) as provider:
        for name, value in provider.container.items():
            monkeypatch.setenv(name, value)
        async with aclosing(open_store(place)) as store, asyncio.TaskGroup() as group:
            revoking = group.create_task(revoke(provider))
            until = time.monotonic() + 185
            while time.monotonic() < until:
                await traffic(store, iter([False, True]).__next__)
                sent += 2
            revoking.cancel()
    assert len(provider.issued) >= 6
    assert all(count > 10 for count in meanwhile[1:])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Those that are taken away


def engine(
    server: Ceph, bucket: str, transport: Literal["sdk", "direct"] = "sdk", **more: Any
) -> ECCacheEngine:
    config = ECConfig(
        url=server.url(bucket), s3_transport=transport, max_local_cpu_size="64MiB", **more
    )
    return ECCacheEngine(config, SPACE)


def tensor(number: int) -> torch.Tensor:
    return torch.full((4, 8), number, dtype=torch.bfloat16)


def stored(server: Ceph, bucket: str, count: int) -> None:
    with engine(server, bucket) as writer:
        for number in range(count):
            assert writer.put(f"item-{number}", tensor(number))
            assert number % 20 or writer.flush(timeout=WAIT)  # the queue is bounded
        assert writer.flush(timeout=WAIT)


def hit_in_time(cache: ECCacheEngine, names: Iterator[int]) -> bool:
    """Whether one of the items becomes a hit."""
    give_up = time.monotonic() + WAIT
    while time.monotonic() < give_up:
        number = next(names)
        found = cache.get(f"item-{number}")
        if found is not None:
            return torch.equal(found, tensor(number))
        time.sleep(0.3)
    return False


def complaints(caplog: pytest.LogCaptureFixture, operation: str) -> list[str]:
    begin = f"a request to the bucket failed: {operation} failed"
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(begin)]


@pytest.mark.parametrize("transport", ["sdk", "direct"])
@pytest.mark.parametrize("how", ["removed", "suspended"])
def test_an_engine_survives_that_its_keys_are_revoked_and_hits_again_when_they_are_back(
    server: Ceph,
    how: str,
    transport: Literal["sdk", "direct"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"u{uuid.uuid4().hex[:12]}"
    who = server.add_stranger(name)
    client = server.client(who)
    client.create_bucket(Bucket=name)
    client.close()
    use(monkeypatch, who)
    stored(server, name, ITEMS)
    with engine(server, name, transport) as cache:
        numbers = iter(range(ITEMS))
        assert hit_in_time(cache, numbers)
        if how == "removed":
            server.revoke(who)
        else:
            server._admin("user", "suspend", "--uid", name)
        for _ in range(20):
            assert cache.get(f"item-{next(numbers)}") is None
        assert cache.put("own", tensor(7))
        found = cache.get("own")
        assert found is not None
        assert torch.equal(found, tensor(7))
        cache.flush(timeout=WAIT)
        assert len(complaints(caplog, "get")) == 1
        code = "InvalidAccessKeyId" if how == "removed" else "UserSuspended"
        for line in complaints(caplog, "get") + complaints(caplog, "put"):
            assert code in line
            assert name in line
            assert "check the credentials of the AWS chain" in line
        if how == "removed":
            arguments = ("--access-key", who.access_key, "--secret-key", who.secret_key)
            server._admin("key", "create", "--uid", name, "--key-type", "s3", *arguments)
        else:
            server._admin("user", "enable", "--uid", name)
        assert hit_in_time(cache, numbers)
        assert cache.stats()["breaker_open"] == 0
    assert who.secret_key not in caplog.text


@pytest.mark.parametrize("transport", ["sdk", "direct"])
def test_keys_replaced_in_the_credentials_file_are_used_without_a_restart(
    server: Ceph,
    real_bucket: str,
    user: Keys,
    transport: Literal["sdk", "direct"],
    no_keys: None,
    isolated_aws: Path,
) -> None:
    write_profile(isolated_aws, user)
    stored(server, real_bucket, ITEMS)
    with engine(server, real_bucket, transport) as cache:
        numbers = iter(range(ITEMS))
        assert hit_in_time(cache, numbers)
        server.revoke(user)
        assert cache.get(f"item-{next(numbers)}") is None
        renewed = new_keys()
        server.grant(renewed)
        write_profile(isolated_aws, renewed)
        assert hit_in_time(cache, numbers)


# What is denied


VERBS: dict[str, tuple[str, Callable[[S3Store], Any]]] = {
    "get": ("s3:GetObject", lambda store: read(store, "v1/k")),
    "head": ("s3:GetObject", lambda store: store.head("v1/k")),
    "put": ("s3:PutObject", lambda store: store.put("v1/new", [b"x"])),
    "multipart": ("s3:PutObject", lambda store: store.put("v1/large", [bytes(LARGE)])),
    "list": ("s3:ListBucket", keys),
    "delete": ("s3:DeleteObject", lambda store: store.delete(["v1/k"])),
}


async def outcome(store: S3Store, verb: str) -> str:
    """The message of a denial, `absent` for a miss, else that there was none."""
    try:
        answer = await VERBS[verb][1](store)
    except RemoteDeniedError as error:
        return told(error)
    if verb == "delete":
        return "; ".join(answer.failed.values()) or "done"
    return "absent" if answer is None else "done"


def told(error: BaseException | None) -> str:
    """All that a log with tracebacks would show of an error."""
    shown = []
    while error is not None:
        shown.append(f"{error} {error!r}")
        error = error.__cause__ or error.__context__
    return "\n".join(shown)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_right_that_the_bucket_s_policy_withholds_is_named_and_nothing_else_is_lost(
    open_store: Callable[..., S3Store],
    server: Ceph,
    place: S3Location,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="ec_s3")
    name = f"u{uuid.uuid4().hex[:12]}"
    who = server.add_stranger(name)
    client = server.client()
    client.put_object(Bucket=place.bucket, Key="v1/k", Body=b"x")
    right = VERBS[verb][0]
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": [f"arn:aws:iam:::user/{name}"]},
        "Action": sorted({each for each, _ in VERBS.values()} - {right}),
        "Resource": [f"arn:aws:s3:::{place.bucket}", f"arn:aws:s3:::{place.bucket}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    client.put_bucket_policy(Bucket=place.bucket, Policy=policy)
    client.close()
    use(monkeypatch, who)
    store = open_store(place)
    said = await outcome(store, verb)
    assert await outcome(store, "list" if verb != "list" else "get") == "done"
    if right == "s3:GetObject":
        assert said == "absent"
        assert await outcome(store, verb) == "absent"
        (said,) = [record.getMessage() for record in caplog.records]
        assert "403" in said
    else:
        operation = "put" if verb == "multipart" else verb
        assert f"{operation} failed: 403 AccessDenied" in said
    assert right in said
    assert place.bucket in said
    await store.aclose()
    assert who.secret_key not in said + caplog.text
    assert "Signature" not in said + caplog.text


WRONG = {
    "wrong secret": ("SignatureDoesNotMatch", "check the credentials"),
    "unknown key": ("InvalidAccessKeyId", "check the credentials"),
    "clock": ("RequestTimeTooSkewed", "set the clock of this machine"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_wrong_with_the_credentials_is_named_by_every_verb_and_nothing_secret_is(
    open_store: Callable[..., S3Store],
    server: Ceph,
    place: S3Location,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="ec_s3")
    who = Keys(server.access_key, server.secret_key)
    if wrong == "wrong secret":
        who = Keys(who.access_key, HUSH)
    elif wrong == "unknown key":
        who = new_keys()
    else:
        put_clock_forward(monkeypatch, 3600)
    use(monkeypatch, who)
    if wrong != "clock":
        monkeypatch.setenv("AWS_SESSION_TOKEN", "HUSH-session-token")
    store = open_store(place)
    for verb in VERBS:
        said = await outcome(store, verb)
        code, remedy = WRONG[wrong]
        assert code in said, verb
        assert remedy in said, verb
        assert place.bucket in said
        for secret in (who.secret_key, "HUSH", "Signature=", "X-Amz-", "AWS4-HMAC"):
            assert secret not in said, verb
    await store.aclose()
    assert "HUSH" not in caplog.text
    assert who.secret_key not in caplog.text


@pytest.mark.parametrize("wrong", ["wrong secret", "unknown key", "no right"])
def test_the_doctor_names_a_denial_and_shows_no_secret(
    server: Ceph,
    real_bucket: str,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="ec_s3")
    who, said = Keys(server.access_key, HUSH), "SignatureDoesNotMatch"
    if wrong == "unknown key":
        who, said = new_keys(), "InvalidAccessKeyId"
    elif wrong == "no right":
        who, said = server.add_stranger(f"u{uuid.uuid4().hex[:12]}"), "AccessDenied"
    use(monkeypatch, who)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "HUSH-session-token")
    for options in ([], ["--json"]):
        result = CliRunner().invoke(app, [*options, "--url", server.url(real_bucket), "doctor"])
        shown = result.output + caplog.text
        assert result.exit_code == 1
        assert said in result.output
        assert real_bucket in result.output
        for secret in (who.secret_key, "HUSH", "Signature=", "AWS4-HMAC"):
            assert secret not in shown


def test_counters_and_what_an_engine_shows_hold_no_secret(
    server: Ceph, real_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = Keys(server.access_key, HUSH)
    use(monkeypatch, who)
    with engine(server, real_bucket) as cache:
        assert cache.get("item-0") is None
        shown = f"{cache!r} {cache.stats()}"
        assert cache.stats()["misses_denied"] == 1
    assert HUSH not in shown
    assert who.access_key not in shown


def put_clock_forward(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """For the signatures of both transports, as a machine with a wrong clock makes them."""
    import botocore.auth
    from botocore.compat import get_current_datetime

    from ec_s3.exchange import Address

    def ahead(*args: Any, **more: Any) -> Any:
        import datetime

        return get_current_datetime(*args, **more) + datetime.timedelta(seconds=seconds)

    def stamp(self: Address) -> str:
        return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + seconds))

    monkeypatch.setattr(botocore.auth, "get_current_datetime", ahead)
    monkeypatch.setattr(Address, "stamp", stamp)
