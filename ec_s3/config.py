"""The settings of one engine: `ECConfig`, frozen, checked once, with the source of each value.

Owns every setting's name, type, bounds, default and meaning; the reference page is generated from
here. Built in whichever process starts an engine and pickled to others. Never holds a credential:
those stay in the AWS chain. Reads files only through `sources`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ec_s3 import complaints, sources
from ec_s3.errors import ConfigError
from ec_s3.signing import parse_keys
from ec_s3.url import DirectoryLocation, S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.signing import Keyring
    from ec_s3.sources import Located

_MIN_HOST_BYTES = 256 << 10
_MIN_DISK_BYTES = 1 << 20
_MIN_CONNECTIONS = 64


def _local_path(value: object) -> object:
    """A path that does not depend on the working directory; `file://` and `~` are understood."""
    if not isinstance(value, str | Path):
        return value
    path = str(value).removeprefix("file://")
    if not path.strip() or "\0" in path:
        raise ValueError("an empty path; name a file or directory, or leave the setting out")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ValueError("the user of this home directory is not known; write the path") from None


def _file_of(named: Located) -> Path:
    try:
        return Path(str(_local_path(named.value)))
    except ValueError as error:
        message = f"config_file: {error}"
        raise ConfigError(complaints.locate(message, {"config_file": named})) from None


def _readable_class(value: str | None) -> str | None:
    if value is not None and value.upper() in {"GLACIER", "DEEP_ARCHIVE"}:
        raise ValueError("objects of this class cannot be read at once; choose another class")
    return value


Size = Annotated[int, BeforeValidator(sources.parse_size)]
Rate = Annotated[int | None, BeforeValidator(sources.parse_rate)]
Duration = Annotated[float, BeforeValidator(sources.parse_duration)]
Lifetime = Annotated[float | None, BeforeValidator(sources.parse_lifetime)]
Count = Annotated[int, BeforeValidator(sources.parse_count)]
Switch = Annotated[bool, BeforeValidator(sources.parse_switch)]
Tags = Annotated[dict[str, str], BeforeValidator(sources.parse_tags)]
LocalPath = Annotated[Path | None, BeforeValidator(_local_path)]
StorageClass = Annotated[str | None, AfterValidator(_readable_class)]


class ECConfig(BaseSettings):
    """All settings of an engine; immutable, picklable, equal when every value and source is.

    Sources, strongest first: arguments, `EC_S3_*` variables, the YAML file, LMCache's spellings,
    defaults. Sizes take bytes or `"8GiB"`, durations seconds or `"250ms"`. Safe to share between
    threads.

    Raises:
        ConfigError: a value that cannot be used, a credential, or with `strict` an unknown name.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=()
    )

    config_file: LocalPath = Field(
        default=None, description="YAML file with further settings; variable `EC_S3_CONFIG`."
    )
    strict: Switch = Field(
        default=False, description="Refuse unknown settings instead of logging and dropping them."
    )

    url: str | None = Field(
        default=None,
        description="Where encoded objects are shared: `s3://bucket/prefix?endpoint=...&region=...`"
        " or `file:///dir`. Unset: memory only.",
    )
    ca_bundle: LocalPath = Field(
        default=None, description="PEM file with the certificate authorities of the endpoint."
    )
    verify: Switch = Field(default=True, description="Check the endpoint's certificate.")
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = Field(
        default=None, description="Server-side encryption to ask for; unset: the bucket's default."
    )
    sse_kms_key_id: str | None = Field(
        default=None,
        min_length=1,
        description="KMS key; needs an `aws:kms` kind of `sse`.",
    )
    storage_class: StorageClass = Field(
        default=None, min_length=1, description="Storage class of written objects."
    )
    tags: Tags = Field(
        default_factory=dict, max_length=10, description="Object tags, at most 10: `team=ml,env=x`."
    )

    s3_transport: Literal["sdk", "direct"] = Field(
        default="sdk",
        description="What carries the busiest requests to S3: the AWS SDK, or ec_s3's own HTTP"
        " client, which takes a tenth of the CPU time for each.",
    )

    max_local_cpu_size: Size = Field(
        default=1 << 30, ge=_MIN_HOST_BYTES, description="Host memory for tensors, per engine."
    )
    local_disk: LocalPath = Field(
        default=None, description="Directory that keeps encoded objects across restarts."
    )
    max_local_disk_size: Size = Field(
        default=64 << 30, ge=_MIN_DISK_BYTES, description="Room in `local_disk`."
    )
    warm_start: Size = Field(
        default=0,
        ge=0,
        description="Bytes of tensors to load into host memory from the start on, in the"
        " background: from `local_disk`, then the newest of the bucket. 0: none.",
    )
    max_item_size: Size = Field(
        default=1 << 30, ge=1, description="Largest tensor that is stored or read."
    )

    connect_timeout: Duration = Field(
        default=2.0, gt=0, description="Longest wait for a connection to the endpoint."
    )
    read_timeout: Duration = Field(
        default=5.0, gt=0, description="Longest silence of the endpoint within an answer."
    )
    blocking_timeout: Duration = Field(
        default=10.0, gt=0, description="Deadline of one `get` or `contains`, all tiers together."
    )
    fetch_timeout: Duration = Field(
        default=2.0,
        gt=0,
        description="How long a request that carries its media may wait for a fetch before the"
        " encoder runs.",
    )
    metadata_timeout: Duration = Field(
        default=30.0, gt=0, description="The same for a request without media, which then fails."
    )
    flush_timeout: Duration = Field(
        default=10.0, ge=0, description="How long `flush` and `close` wait for uploads."
    )

    policy: Literal["latency", "throughput", "always", "never"] = Field(
        default="throughput",
        description="Whether a request that carries its media waits for the bucket: wherever that"
        " may spare an encode (`throughput`), only where it is expected to save time (`latency`),"
        " without believing an index (`always`), or not at all (`never`).",
    )
    index_max_age: Duration = Field(
        default=3600.0,
        ge=0,
        description="How long after its making a namespace's index is believed.",
    )
    max_deferred_requests: Count = Field(
        default=16, ge=0, description="Requests that may wait for fetches at a time."
    )
    max_fetches: Count = Field(default=16, ge=1, description="Concurrent fetches.")
    max_uploads: Count = Field(default=16, ge=1, description="Concurrent uploads.")
    upload_queue_items: Count = Field(
        default=1024, ge=1, description="Items that may wait for their upload."
    )
    upload_queue_size: Size = Field(
        default=1 << 30, ge=1, description="Encoded bytes that may wait for their upload."
    )
    upload_rate: Rate = Field(
        default=None, gt=0, description="Bytes per second to upload, such as `50MB/s`; unset: all."
    )
    second_sight: Switch = Field(
        default=False, description="Upload an item only when it is put for the second time."
    )
    compression_level: Count = Field(
        default=1, ge=1, le=3, description="zstd level; higher ones gain nothing on byte planes."
    )
    negative_ttl: Duration = Field(
        default=5.0, ge=0, description="How long an absent object is not asked for again."
    )
    positive_ttl: Duration = Field(
        default=60.0, ge=0, description="How long an object once seen counts as present."
    )
    object_lifetime: Lifetime = Field(
        default=None,
        gt=0,
        description="After what time a lifecycle rule of the bucket removes objects, such as `30d`:"
        " those that are served when they are older than 80 % of it are written again. Unset: none"
        " are.",
    )
    audit_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the items found that are encoded all the same, to be compared with"
        " what is stored.",
    )

    model: str | None = Field(
        default=None,
        min_length=1,
        description="Identity of the model in place of its path or name, so that copies of one"
        " model share objects.",
    )
    revision: str = Field(default="", description="Revision of the model.")
    weight_version: str = Field(
        default="", description="Name of the weights; change it whenever weights change in place."
    )
    adapter: str = Field(default="", description="Fingerprint of an adapter on the encoder.")
    salt: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="Secret that separates deployments or tenants; stored only as an HMAC.",
    )
    signing_key: SecretStr | None = Field(
        default=None,
        description="Keys that sign objects, each `id:hex`, with commas between: the first signs,"
        " all are accepted, and what none of them has signed is a miss. Not for vLLM's own options,"
        " which vLLM logs.",
    )
    signing_key_file: LocalPath = Field(
        default=None, description="File with such keys, one a line, in place of `signing_key`."
    )
    require_binding: Switch = Field(
        default=False,
        description="Let a request that carries its media take only objects that name the input"
        " they were made from.",
    )
    persist_client_uuids: Switch = Field(
        default=False,
        description="Also keep outputs for identifiers that do not look like a hash of the content,"
        " but were chosen by a client.",
    )
    salted_requests: Switch = Field(
        default=False,
        description="Also serve requests that carry a `cache_salt`, each salt with items of its"
        " own.",
    )
    engine: Literal["thread", "process"] = Field(
        default="process",
        description="Run the engine in a process of its own, so that moving data never takes the"
        " interpreter from vLLM's steps, or on a thread of the scheduler's process.",
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    # Any: type checkers would take the fields' types, and refuse `max_local_cpu_size="8GiB"`.
    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise complaints.wrapped_error(error) from None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Self:
        """Settings from a map of arguments, such as vLLM's `ec_connector_extra_config`.

        Raises:
            ConfigError: as the constructor.
        """
        arguments: dict[str, Any] = {str(name): value for name, value in mapping.items()}
        return cls(**arguments)

    def source(self, name: str) -> str:
        """Where a setting's value came from; `default` when nobody set it.

        Raises:
            KeyError: no setting has this name.
        """
        if name not in type(self).model_fields:
            raise KeyError(name)
        return self._sources.get(name, "default")

    def location(self) -> S3Location | DirectoryLocation | None:
        """What `url` points to, None when it is unset."""
        return None if self.url is None else parse_url(self.url)

    def s3_options(self) -> S3Options:
        """The settings that an S3 client needs."""
        return S3Options(
            ca_bundle=None if self.ca_bundle is None else str(self.ca_bundle),
            verify=self.verify,
            sse=self.sse,
            sse_kms_key_id=self.sse_kms_key_id,
            storage_class=self.storage_class,
            tags=dict(self.tags),
            connect_timeout=self.connect_timeout,
            read_timeout=self.read_timeout,
            max_connections=max(_MIN_CONNECTIONS, self.max_fetches + self.max_uploads),
            transport=self.s3_transport,
        )

    def keyring(self) -> Keyring | None:
        """The keys that sign objects and are accepted; None when objects are not signed.

        Raises:
            ConfigError: the keys cannot be read or used, or are given twice.
        """
        key, path = self.signing_key, self.signing_key_file
        if key is not None and path is not None:
            raise ConfigError("signing_key: signing_key_file is set as well; keep one of the two")
        name = "signing_key" if path is None else "signing_key_file"
        try:
            if path is not None:
                return parse_keys(sources.read_keys(path))
            return None if key is None else parse_keys(key.get_secret_value())
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003  ours carry each value's source
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  not a source here
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003  not a source here
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers, strongest first; their values are `Located` until they are judged."""
        arguments = sources.read_arguments(init_settings())
        environment = sources.read_environment(os.environ)
        layers = [arguments, environment]
        named = arguments.get("config_file") or environment.get("config_file")
        if named is not None and named.value is not None:
            layers.append(sources.read_file(_file_of(named)))
        layers.append(sources.read_lmcache(os.environ))
        return tuple(InitSettingsSource(settings_cls, dict(layer)) for layer in layers)

    @model_validator(mode="wrap")
    @classmethod
    def _judge(cls, located: dict[str, Located], handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop or refuse what is no setting, validate the rest, remember the sources."""
        known = {name: item for name, item in located.items() if name in cls.model_fields}
        unknown = {name: item for name, item in located.items() if name not in known}
        complaints.refuse_credentials(unknown)
        try:
            config = handler({name: item.value for name, item in known.items()})
            config.s3_options()  # its checks span several settings
            config.keyring()  # a key that is not there must not be found out by the first object
        except ValidationError as error:
            raise ConfigError(complaints.describe(error, known)) from None
        except ConfigError as error:
            raise ConfigError(complaints.locate(str(error), known)) from None
        complaints.report_unknown(unknown, known=tuple(cls.model_fields), strict=config.strict)
        config._sources = {  # noqa: SLF001  a constructor in all but name
            name: item.source for name, item in known.items()
        }
        return config

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            if not 0 < len(key) <= 128 or len(text) > 256 or key.lower().startswith("aws:"):
                raise ValueError(
                    "S3 refuses a tag without a name, with one that begins with aws: or has more"
                    " than 128 characters, or with more than 256 in its value"
                )
        return value

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_url(value)
        return value
