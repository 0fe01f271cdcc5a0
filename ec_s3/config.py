"""The settings of one engine: `ECConfig`, frozen, checked once, with the source of each value.

Owns every setting's name, type, bounds, default and meaning; the reference page is generated from
here. Built in whichever process starts an engine and pickled to others. Never holds a credential:
those stay in the AWS chain. Reads files only through `sources`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
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

from ec_s3 import sources
from ec_s3.errors import ConfigError
from ec_s3.url import DirectoryLocation, S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.sources import Located

logger = logging.getLogger(__name__)

_MIN_HOST_BYTES = 256 << 10
_MIN_DISK_BYTES = 1 << 20
_MIN_CONNECTIONS = 64


def _local_path(value: object) -> object:
    """A path that does not depend on the working directory; `file://` and `~` are understood."""
    if not isinstance(value, str | Path):
        return value
    path = str(value).removeprefix("file://")
    if not path:
        raise ValueError("an empty path; name a file or directory, or leave the setting out")
    return Path(path).expanduser().absolute()


def _readable_class(value: str | None) -> str | None:
    if value is not None and value.upper() in {"GLACIER", "DEEP_ARCHIVE"}:
        raise ValueError("objects of this class cannot be read at once; choose another class")
    return value


Size = Annotated[int, BeforeValidator(sources.parse_size)]
Rate = Annotated[int | None, BeforeValidator(sources.parse_rate)]
Duration = Annotated[float, BeforeValidator(sources.parse_duration)]
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

    max_local_cpu_size: Size = Field(
        default=1 << 30, ge=_MIN_HOST_BYTES, description="Host memory for tensors, per engine."
    )
    local_disk: LocalPath = Field(
        default=None, description="Directory that keeps encoded objects across restarts."
    )
    max_local_disk_size: Size = Field(
        default=64 << 30, ge=_MIN_DISK_BYTES, description="Room in `local_disk`."
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

    max_deferred_requests: Count = Field(
        default=16, ge=0, description="Requests that may wait for fetches at a time."
    )
    max_fetches: Count = Field(default=16, ge=1, description="Concurrent fetches.")
    max_uploads: Count = Field(default=4, ge=1, description="Concurrent uploads.")
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
    engine: Literal["thread", "process"] = Field(
        default="thread",
        description="Run the engine on a thread of the scheduler's process or in its own process.",
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    if not TYPE_CHECKING:  # type checkers keep the signature that the fields give

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _config_error(error) from None

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
        )

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
            layers.append(sources.read_file(Path(str(_local_path(named.value)))))
        layers.append(sources.read_lmcache(os.environ))
        return tuple(InitSettingsSource(settings_cls, dict(layer)) for layer in layers)

    @model_validator(mode="wrap")
    @classmethod
    def _judge(cls, located: dict[str, Located], handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop or refuse what is no setting, validate the rest, remember the sources."""
        known = {name: item for name, item in located.items() if name in cls.model_fields}
        unknown = {name: item for name, item in located.items() if name not in known}
        _refuse_credentials(unknown)
        try:
            config = handler({name: item.value for name, item in known.items()})
            config.s3_options()  # its checks span several settings
        except ValidationError as error:
            raise ConfigError(_describe(error, known)) from None
        except ConfigError as error:
            raise ConfigError(_locate(str(error), known)) from None
        _report_unknown(unknown, known=tuple(cls.model_fields), strict=config.strict)
        config._sources = {  # noqa: SLF001  a constructor in all but name
            name: item.source for name, item in known.items()
        }
        return config

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_url(value)
        return value


def _refuse_credentials(unknown: Mapping[str, Located]) -> None:
    for name, item in unknown.items():
        if sources.is_credential(name):
            raise ConfigError(
                f"{name}=<hidden> ({item.source}): credentials are not settings of ec_s3; give "
                "them to the AWS chain (AWS_* variables, a profile, a role)"
            )


def _report_unknown(
    unknown: Mapping[str, Located], *, known: tuple[str, ...], strict: bool
) -> None:
    for name, item in sorted(unknown.items()):
        hint = _nearest(name, known)
        if strict:
            raise ConfigError(f"{name} ({item.source}): no such setting{hint}; correct or drop it")
        logger.warning("unknown setting dropped: %s (%s)%s", name, item.source, hint)


def _nearest(name: str, known: tuple[str, ...]) -> str:
    theirs = {text.partition(" ")[0]: ours for ours, text in sources.LMCACHE_NAMES.items()}
    found = difflib.get_close_matches(name, [*known, *theirs], n=1)
    return f"; did you mean {theirs.get(found[0], found[0])}?" if found else ""


def _describe(error: ValidationError, known: Mapping[str, Located]) -> str:
    """One line per bad value: key, value, source, remedy."""
    lines = []
    for detail in error.errors(include_url=False):
        cause = str(detail.get("ctx", {}).get("error", detail["msg"]))
        name = str(detail["loc"][0])
        lines.append(_locate(f"{name}: {cause.removeprefix(f'{name}: ')}", known))
    return "; ".join(lines)


def _locate(message: str, known: Mapping[str, Located]) -> str:
    """Add value and source to a message of the form `setting: what is wrong`."""
    name, _, remedy = message.partition(": ")
    if name not in known:
        return message
    item = known[name]
    hint = _size_hint(name, item.value)
    return f"{name}={_shown(name, item.value)} ({item.source}): {remedy}{hint}"


def _shown(name: str, value: object) -> str:
    """A value as an error may show it, without what is or might hold a secret."""
    if name == "salt" or (name == "url" and "@" in str(value)):
        return "<hidden>"
    if name == "url" and isinstance(value, str):
        return repr(re.sub(r"[?#].*", "?<hidden>", value))
    return repr(value)


def _size_hint(name: str, value: object) -> str:
    """For those used to sizes in GB."""
    if not name.endswith("_size") or not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    return f"; a bare number is bytes, write '{value:g}GiB' for GiB" if value < 4096 else ""


def _config_error(error: ValidationError) -> ConfigError:
    """The `ConfigError` that pydantic has wrapped."""
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return cause
    return ConfigError(str(error))
