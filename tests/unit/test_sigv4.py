from __future__ import annotations

import datetime
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.sigv4 import UNSIGNED_PAYLOAD, Credentials, Signer

NOW = datetime.datetime(2026, 11, 30, 12, 0, 5, tzinfo=datetime.UTC)
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
SIGNED = st.dictionaries(
    st.sampled_from(["range", "if-match", "if-none-match", "x-amz-tagging", "x-amz-storage-class"]),
    VALUES,
)


class _NoHash(S3SigV4Auth):
    def payload(self, request: AWSRequest) -> str:
        return UNSIGNED_PAYLOAD


@given(
    method=st.sampled_from(["GET", "HEAD", "PUT", "DELETE"]),
    key=VALUES,
    extra=SIGNED,
    token=st.none() | VALUES,
    upload=st.none() | VALUES,
)
def test_signatures_are_those_of_the_sdk(
    method: str, key: str, extra: dict[str, str], token: str | None, upload: str | None
) -> None:
    credentials = Credentials("AKEY", "SECRET/+", token)
    path = "/bucket/" + quote(key, safe="/~")
    query = "" if upload is None else f"partNumber=7&uploadId={quote(upload, safe='')}"
    url = f"https://host.example:9000{path}" + (f"?{query}" if query else "")
    request = AWSRequest(method, url, headers=dict(extra))
    request.context["timestamp"] = NOW.strftime("%Y%m%dT%H%M%SZ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda **_: NOW.replace(tzinfo=None))
        _NoHash(ReadOnlyCredentials("AKEY", "SECRET/+", token), "s3", "eu-north-1").add_auth(
            request
        )
    headers = {
        "host": "host.example:9000",
        "x-amz-content-sha256": UNSIGNED_PAYLOAD,
        "x-amz-date": NOW.strftime("%Y%m%dT%H%M%SZ"),
        **extra,
        **({"x-amz-security-token": token} if token else {}),
    }
    made = Signer("eu-north-1").authorization(
        credentials, method=method, path=path, query=query, headers=headers
    )
    assert made == request.headers["Authorization"]


def test_the_key_of_the_day_is_made_anew_with_the_day_and_with_the_secret() -> None:
    signer = Signer("us-east-1")
    made = []
    for secret, stamp in (("one", "20261130"), ("two", "20261130"), ("one", "20261201")):
        headers = {
            "host": "h",
            "x-amz-content-sha256": UNSIGNED_PAYLOAD,
            "x-amz-date": f"{stamp}T000000Z",
        }
        credentials = Credentials("AKEY", secret, None)
        for fresh in (signer, Signer("us-east-1")):
            made.append(
                fresh.authorization(
                    credentials, method="GET", path="/b/k", query="", headers=headers
                )
            )
    assert made[::2] == made[1::2]
    assert len(set(made)) == 3
    assert not any("one" in line or "two" in line for line in made)
    assert "SECRET" not in repr(Credentials("AKEY", "SECRET", "SECRET"))
