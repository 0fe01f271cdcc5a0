"""The SDKs as they come: get_object and put_object of the tensor's bytes, checksums off."""

from __future__ import annotations

from typing import Any

import numpy as np
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from boto3.session import Session
from botocore.config import Config

from suite.systems.base import AsyncSystem, ThreadSystem

BUCKET = "plain"
OPTIONS: dict[str, Any] = {
    "max_pool_connections": 64,
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"addressing_style": "path"},
}
CLIENT: dict[str, Any] = {
    "service_name": "s3",
    "region_name": "us-east-1",
    "aws_access_key_id": "testaccess",
    "aws_secret_access_key": "testsecret",
}


class Plain:
    """Tensors are plain bytes here."""

    shape: tuple[int, int]

    def tensor(self, bits: Any) -> bytes:
        return bytes(bits.tobytes())

    def bits(self, result: bytes) -> Any:
        return np.frombuffer(result, dtype=np.uint16).reshape(self.shape)

    def path(self, name: str) -> str:
        return f"/{BUCKET}/{name}"


class Aiobotocore(Plain, AsyncSystem):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._context = get_session().create_client(
            **CLIENT, endpoint_url=settings["endpoint"], config=AioConfig(**OPTIONS)
        )
        self.client = self.loop.run_until_complete(self._context.__aenter__())

    async def put(self, item: tuple[str, bytes]) -> bool:
        await self.client.put_object(Bucket=BUCKET, Key=item[0], Body=item[1])
        return True

    async def get(self, name: str) -> bytes | None:
        try:
            answer = await self.client.get_object(Bucket=BUCKET, Key=name)
        except self.client.exceptions.NoSuchKey:
            return None
        async with answer["Body"] as body:
            whole: bytes = await body.read()
            return whole

    async def contains(self, name: str) -> bool:
        try:
            await self.client.head_object(Bucket=BUCKET, Key=name)
        except self.client.exceptions.ClientError:
            return False
        return True


class Boto3(Plain, ThreadSystem):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.client = Session().client(
            **CLIENT, endpoint_url=settings["endpoint"], config=Config(**OPTIONS)
        )

    def put(self, item: tuple[str, bytes]) -> bool:
        self.client.put_object(Bucket=BUCKET, Key=item[0], Body=item[1])
        return True

    def get(self, name: str) -> bytes | None:
        try:
            whole: bytes = self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return whole

    def contains(self, name: str) -> bool:
        try:
            self.client.head_object(Bucket=BUCKET, Key=name)
        except self.client.exceptions.ClientError:
            return False
        return True


SYSTEMS = {"aiobotocore": Aiobotocore, "boto3": Boto3}
