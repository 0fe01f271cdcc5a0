"""What is said about settings that cannot be used: key, value, source, remedy, never a secret.

Owns the wording of errors and warnings about settings, and which values they hide. Pure but for
the log; runs wherever an `ECConfig` is built. Never decides whether a value is good.
"""

from __future__ import annotations

import difflib
import logging
import re
import reprlib
from typing import TYPE_CHECKING

from ec_s3 import sources
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError

    from ec_s3.sources import Located

logger = logging.getLogger(__name__)

SECRETS = frozenset({"salt", "signing_key"})
"""Settings whose values are never shown."""

_short = reprlib.Repr()  # YAML's aliases make values of any size out of a few lines
_short.maxlevel = 3
_short.maxstring = _short.maxother = 200


def refuse_credentials(unknown: Mapping[str, Located]) -> None:
    """Refuse settings that have the name of a credential.

    Raises:
        ConfigError: there is one.
    """
    for name, item in unknown.items():
        if sources.is_credential(name):
            raise ConfigError(
                f"{name}=<hidden> ({item.source}): credentials are not settings of ec_s3; give "
                "them to the AWS chain (AWS_* variables, a profile, a role)"
            )


def report_unknown(unknown: Mapping[str, Located], *, known: tuple[str, ...], strict: bool) -> None:
    """Log the settings that do not exist, with the nearest that does.

    Raises:
        ConfigError: `strict`, and there is one.
    """
    for name, item in sorted(unknown.items()):
        hint = _nearest(name, known)
        if strict:
            raise ConfigError(f"{name} ({item.source}): no such setting{hint}; correct or drop it")
        logger.warning("unknown setting dropped: %s (%s)%s", name, item.source, hint)


def _nearest(name: str, known: tuple[str, ...]) -> str:
    theirs = {text.partition(" ")[0]: ours for ours, text in sources.LMCACHE_NAMES.items()}
    found = difflib.get_close_matches(name, [*known, *theirs], n=1)
    return f"; did you mean {theirs.get(found[0], found[0])}?" if found else ""


def describe(error: ValidationError, known: Mapping[str, Located]) -> str:
    """One line per bad value: key, value, source, remedy."""
    lines = []
    for detail in error.errors(include_url=False):
        cause = str(detail.get("ctx", {}).get("error", detail["msg"]))
        name = str(detail["loc"][0])
        lines.append(locate(f"{name}: {cause.removeprefix(f'{name}: ')}", known))
    return "; ".join(lines)


def locate(message: str, known: Mapping[str, Located]) -> str:
    """Add value and source to a message of the form `setting: what is wrong`."""
    name, _, remedy = message.partition(": ")
    if name not in known:
        return message
    item = known[name]
    hint = _size_hint(name, item.value)
    return f"{name}={_shown(name, item.value)} ({item.source}): {remedy}{hint}"


def _shown(name: str, value: object) -> str:
    """A value as an error may show it, without what is or might hold a secret."""
    if name in SECRETS or (name == "url" and "@" in str(value)):
        return "<hidden>"
    if name == "url" and isinstance(value, str):
        return repr(re.sub(r"(?s)[?#].*", "?<hidden>", value))
    return _short.repr(value)


def _size_hint(name: str, value: object) -> str:
    """For those used to sizes in GB."""
    if not name.endswith("_size") or not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    return f"; a bare number is bytes, write '{value:g}GiB' for GiB" if value < 4096 else ""


def wrapped_error(error: ValidationError) -> ConfigError:
    """The `ConfigError` that pydantic has wrapped."""
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return cause
    return ConfigError(str(error))
