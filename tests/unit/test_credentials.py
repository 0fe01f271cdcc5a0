"""When the AWS chain is asked for credentials, and that no request waits for what is not due."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from aiobotocore.credentials import AioCredentials, AioRefreshableCredentials
from botocore.exceptions import CredentialRetrievalError, NoCredentialsError
from credential_provider import CredentialProvider, Issued
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.credentials import Keeper
from ec_s3.errors import RemoteDeniedError
from ec_s3.failures import UnobtainableError
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server

PLACE = "bucket 'b' at http://h"


class Chain:
    """An AWS chain with a clock of its own; its answers can be held up or fail.

    Attributes:
        lifetime: seconds that credentials last, None for ever.
        name: of the access key, instead of a new one with each answer.
        secret, token: the rest of its answers.
        failure: raised instead of an answer.
        empty: whether there are no credentials.
    """

    def __init__(self) -> None:
        self.now = time.time()
        self.lifetime: float | None = None
        self.name = ""
        self.secret, self.token = "HUSHSECRET", "HUSHTOKEN"
        self.failure: Exception | None = None
        self.empty = False
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> Any:
        self.asked += 1
        number = self.asked
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if self.empty:
            return None
        key = self.name or f"AKEY{number}"
        if self.lifetime is None:
            return AioCredentials(key, self.secret, self.token)
        ends = datetime.datetime.fromtimestamp(self.now + self.lifetime, datetime.UTC)
        return AioRefreshableCredentials(
            *(key, self.secret, self.token, ends), refresh_using=self.again, method="fake"
        )

    async def again(self) -> Any:
        raise AssertionError("the provider was asked twice for one answer")


@pytest.fixture
async def chain() -> Chain:
    return Chain()


@pytest.fixture
async def keeper(chain: Chain) -> AsyncIterator[Keeper]:
    keeper = Keeper(chain, place=PLACE, clock=lambda: chain.now)
    yield keeper
    await keeper.aclose()


async def key(keeper: Keeper) -> str:
    return (await keeper.get_frozen_credentials()).access_key


async def settle() -> None:
    """Let tasks that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("lifetime", "due"), [(60, 30), (3600, 2700), (43200, 42300), (2, 1)])
async def test_credentials_are_renewed_beside_the_requests_well_before_they_end(
    chain: Chain, keeper: Keeper, lifetime: int, due: int
) -> None:
    chain.lifetime = lifetime
    assert await key(keeper) == "AKEY1"
    chain.now += due - 0.5
    assert await key(keeper) == "AKEY1"
    await settle()
    assert chain.asked == 1
    chain.gate.clear()
    chain.now += 0.6
    for _ in range(3):
        assert await asyncio.wait_for(key(keeper), 1) == "AKEY1"
    await settle()
    assert chain.asked == 2
    chain.gate.set()
    await settle()
    assert await key(keeper) == "AKEY2"


async def test_a_thousand_requests_with_a_minute_s_credentials_ask_once_for_each_half_of_it(
    chain: Chain, keeper: Keeper
) -> None:
    chain.lifetime = 60
    for _ in range(1000):
        await key(keeper)
        await settle()
        chain.now += 0.18
    assert chain.asked == 6


async def test_without_requests_they_are_renewed_all_the_same(chain: Chain, keeper: Keeper) -> None:
    chain.lifetime = 0.2
    assert await key(keeper) == "AKEY1"
    async with asyncio.timeout(20):
        while chain.asked < 3:
            await asyncio.sleep(0.01)
            chain.now = time.time()


async def test_a_provider_that_gives_the_same_until_shortly_before_their_end_is_not_pestered(
    chain: Chain, keeper: Keeper
) -> None:
    chain.name, chain.lifetime = "SAME", 3600
    ends = chain.now + 3600
    while chain.now < ends - 1:
        chain.lifetime = ends - chain.now
        assert await key(keeper) == "SAME"
        await settle()
        chain.now += 1
    assert chain.asked < 15


async def test_requests_wait_only_where_nothing_valid_is_held_and_ask_together(
    chain: Chain, keeper: Keeper
) -> None:
    chain.lifetime = 60
    chain.gate.clear()
    waiting = [asyncio.ensure_future(key(keeper)) for _ in range(20)]
    await settle()
    waiting[0].cancel()
    await settle()
    assert not any(task.done() for task in waiting[1:])
    chain.gate.set()
    assert await asyncio.gather(*waiting[1:]) == ["AKEY1"] * 19
    assert chain.asked == 1
    chain.now += 61
    assert await key(keeper) == "AKEY2"


async def test_a_failing_provider_is_named_once_while_what_is_held_still_serves(
    chain: Chain, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ec_s3")
    chain.lifetime = 60
    await key(keeper)
    chain.failure = CredentialRetrievalError(provider="container-role", error_msg="HUSHANSWER")
    chain.now += 31
    for _ in range(28):
        assert await key(keeper) == "AKEY1"
        await settle()
        chain.now += 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cannot be renewed: CredentialRetrievalError (container-role)" in record.getMessage()
    assert PLACE in record.getMessage()
    assert chain.asked == 1 + 5  # after 0, 1, 3, 7 and 15 seconds
    chain.now += 2
    with pytest.raises(UnobtainableError, match="CredentialRetrievalError") as caught:
        await key(keeper)
    assert "HUSH" not in caplog.text + repr(caught.value) + str(caught.value)
    assert caught.value.__cause__ is None


async def test_a_clock_that_is_set_back_does_not_keep_the_chain_from_being_asked(
    chain: Chain, keeper: Keeper
) -> None:
    chain.failure = FileNotFoundError(2, "No such file", "/var/run/token")
    with pytest.raises(UnobtainableError):
        await key(keeper)
    chain.failure = None
    chain.now -= 3600
    assert await key(keeper) == "AKEY2"
    chain.now += 1
    assert await key(keeper) == "AKEY2"
    assert chain.asked == 2


@pytest.mark.parametrize("part", ["name", "secret", "token"])
async def test_credentials_that_would_end_a_header_line_are_named_and_not_sent(
    chain: Chain, keeper: Keeper, part: str
) -> None:
    setattr(chain, part, "HUSH\r\nx-amz-acl: public-read")
    with pytest.raises(UnobtainableError, match="a key or token has a line break") as caught:
        await key(keeper)
    assert "HUSH" not in str(caught.value)


async def test_after_a_failure_the_chain_is_asked_ever_more_seldom_and_then_serves_again(
    chain: Chain, keeper: Keeper
) -> None:
    chain.failure = FileNotFoundError(2, "No such file", "/var/run/token")
    for _ in range(300):
        with pytest.raises(UnobtainableError, match="FileNotFoundError: /var/run/token"):
            await key(keeper)
        chain.now += 1
    assert chain.asked == 10  # after 0, 1, 3, 7, 15, 31, 63, 123, 183, 243 seconds
    chain.failure = None
    chain.now += 60
    assert await key(keeper) == "AKEY11"


async def test_credentials_that_appear_later_are_found(chain: Chain, keeper: Keeper) -> None:
    chain.empty = True
    with pytest.raises(NoCredentialsError):
        await key(keeper)
    chain.empty = False
    with pytest.raises(NoCredentialsError):
        await key(keeper)
    chain.now += 1
    assert await key(keeper) == "AKEY2"


async def test_a_provider_that_never_answers_is_given_up(
    chain: Chain, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.credentials._ASK_SECONDS", 0.01)
    chain.gate.clear()
    with pytest.raises(UnobtainableError, match="no answer in time"):
        await key(keeper)


async def test_credentials_that_have_ended_already_are_not_used(
    chain: Chain, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.lifetime = -10

    async def same() -> Any:
        ends = datetime.datetime.fromtimestamp(chain.now - 10, datetime.UTC).isoformat()
        return {"access_key": "A", "secret_key": "HUSH", "token": "HUSH", "expiry_time": ends}

    monkeypatch.setattr(chain, "again", same)
    with pytest.raises(UnobtainableError, match="expired"):
        await key(keeper)


async def test_refused_credentials_are_read_again_and_replaced(
    chain: Chain, keeper: Keeper
) -> None:
    assert await key(keeper) == "AKEY1"
    chain.now += 100_000
    assert await key(keeper) == "AKEY1"
    keeper.refused()
    await settle()
    assert await key(keeper) == "AKEY2"


async def test_refused_credentials_that_the_chain_repeats_stay_in_use_and_it_is_seldom_asked(
    chain: Chain, keeper: Keeper
) -> None:
    chain.name = "ONLY"
    for _ in range(3600):
        assert await key(keeper) == "ONLY"
        keeper.refused()
        await settle()
        chain.now += 0.1
    assert chain.asked == 12  # the first, and after 0, 1, 3, 7, 15, 31, 63, 123 ... 303 seconds
    chain.name = "OTHER"
    chain.now += 60
    keeper.refused()
    await settle()
    assert await key(keeper) == "OTHER"


async def test_closing_ends_what_runs(chain: Chain, keeper: Keeper) -> None:
    chain.gate.clear()
    waiting = asyncio.ensure_future(key(keeper))
    await settle()
    await keeper.aclose()
    await keeper.aclose()
    with pytest.raises(NoCredentialsError):
        await waiting


async def test_nothing_shows_what_is_held(chain: Chain, keeper: Keeper) -> None:
    await key(keeper)
    assert "HUSH" not in repr(keeper) + str(keeper) + repr(vars(keeper))


# In a store


def signers(proxy: FaultServer) -> list[str]:
    """Whose key signed each request, in order."""
    heads = [request.header("Authorization") for request in proxy.log]
    return [head.partition("Credential=")[2].partition("/")[0] for head in heads]


@pytest.fixture
def no_keys(isolated_aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize("source", ["container", "web identity"])
async def test_requests_go_on_with_what_is_held_while_a_provider_takes_its_time(
    open_store: Callable[..., S3Store],
    s3_server: S3Server,
    bucket: str,
    source: str,
    no_keys: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = itertools.count()

    def issue() -> Issued:
        return Issued(f"AKEY{next(numbers)}", "HUSH", time.time() + 4)

    with CredentialProvider(issue) as provider, FaultServer(s3_server.url) as proxy:
        token = tmp_path / "token"
        named = provider.container if source == "container" else provider.web_identity(token)
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        location = S3Location(bucket, endpoint=proxy.url)
        async with aclosing(open_store(location)) as store, asyncio.timeout(60):
            assert await store.head("k") is None
            assert set(signers(proxy)) == {"AKEY0"}
            provider.answers.clear()
            while provider.asked < 2:
                await store.head("k")
            sent = len(proxy.log)
            for _ in range(10):
                await store.head("k")
            assert set(signers(proxy)[sent:]) == {"AKEY0"}
            provider.answers.set()
            while signers(proxy)[-1] == "AKEY0":
                await store.head("k")


async def test_a_provider_that_fails_is_a_denial_with_its_reason(
    open_store: Callable[..., S3Store],
    no_keys: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/r")
    async with aclosing(open_store(S3Location("b", endpoint="http://127.0.0.1:1"))) as store:
        with pytest.raises(RemoteDeniedError, match=r"FileNotFoundError: .*absent.*AWS chain"):
            await store.put("k", [b"x"])


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
async def test_keys_replaced_in_the_credentials_file_are_used_once_the_old_ones_are_refused(
    open_store: Callable[..., S3Store],
    s3_server: S3Server,
    bucket: str,
    code: str,
    no_keys: None,
    isolated_aws: Path,
) -> None:
    def write(key: str) -> None:
        lines = ("[default]", f"aws_access_key_id = {key}", "aws_secret_access_key = HUSH")
        (isolated_aws / "credentials").write_text("\n".join(lines))

    write("OLDKEY")
    with FaultServer(s3_server.url) as proxy:
        async with aclosing(open_store(S3Location(bucket, endpoint=proxy.url))) as store:
            await store.put("k", [b"x"])
            write("NEWKEY")
            await store.put("l", [b"x"])
            proxy.add(Fault(status=400, code=code, times=1))
            with pytest.raises(RemoteDeniedError, match=code):
                await store.put("m", [b"x"])
            async with asyncio.timeout(20):
                while signers(proxy)[-1] != "NEWKEY":
                    await store.put("n", [b"x"], if_absent=False)
        assert set(signers(proxy)) == {"OLDKEY", "NEWKEY"}


def test_the_doctor_names_a_failing_provider_and_repeats_nothing_of_it(
    no_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    with CredentialProvider(lambda: Issued("A", "B", 0.0)) as provider:
        provider.broken = True
        for name, value in provider.container.items():
            monkeypatch.setenv(name, value)
        url = "s3://some-bucket?endpoint=http://127.0.0.1:1"
        result = CliRunner().invoke(app, ["--json", "--url", url, "doctor"])
    assert "CredentialRetrievalError (container-role)" in result.output
    assert "HUSH" not in result.output
