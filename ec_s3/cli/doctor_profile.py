"""`doctor` about the store itself: what it does, what each gap costs here, what it looks like.

Asks with `ec_s3.probe`, compares with the known profiles, and words what was found for people and
for programs. Where probes could not be written or removed again it only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ec_s3.cli.output import counted
from ec_s3.profile import CAPABILITIES, Seen, Support, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.cli.output import Output
    from ec_s3.config import ECConfig
    from ec_s3.probe import Report
    from ec_s3.profile import Capability, KnownProfile
    from ec_s3.store import Store
    from ec_s3.url import S3Location

_READ_ONLY = Seen(Support.UNKNOWN, "not asked, as nothing may be written and removed here")


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found out about a store.

    Attributes:
        report: its answers.
        known: the known server that it looks like, None for none.
        config: the settings that decide what a gap costs.
    """

    report: Report
    known: KnownProfile | None
    config: ECConfig

    def rows(self) -> Iterator[tuple[Capability, Seen, str]]:
        """Every capability that is asked about, what was seen, and what that costs here."""
        for capability in CAPABILITIES:
            if capability.asked:
                seen = self.report.seen.get(capability.name, _READ_ONLY)
                yield capability, seen, capability.cost(seen.support)

    @property
    def costly(self) -> list[str]:
        """Gaps that cost something with these settings."""
        return [
            capability.name
            for capability, _, cost in self.rows()
            if cost and (not capability.setting or getattr(self.config, capability.setting))
        ]

    @property
    def differences(self) -> dict[str, tuple[Support, Support]]:
        """Where it is not as the known server: what is known and what was seen."""
        return {} if self.known is None else self.known.differences(self.report.seen)

    @property
    def elsewhere(self) -> bool:
        """Whether the bucket says that it is in another region than requests are signed for."""
        return self.report.region not in ("", self.report.configured_region)


async def find_out(
    config: ECConfig,
    location: S3Location,
    endpoint: str,
    *,
    folder: str,
    writable: bool,
    store: Store,
) -> Profile:
    """Ask a store what it does.

    Args:
        config: the settings.
        location: the store that they name.
        endpoint: URL that requests go to.
        folder: key below which probes may lie.
        writable: whether probes can be written and removed again.
        store: knows from other requests some of what is not asked then.

    Raises:
        RemoteError: the store cannot be used.
    """
    from ec_s3.probe import ask  # the SDK takes a third of a second to import
    from ec_s3.s3 import S3Store

    report = await ask(location, config.s3_options(), folder=folder, writable=writable)
    if isinstance(store, S3Store):
        for name, support in store.capabilities.snapshot().items():
            report.seen.setdefault(name, Seen(support))
    host = urlsplit(endpoint).hostname or ""
    return Profile(report, nearest(report.headers, host, report.seen), config)


def verdict(profile: Profile) -> tuple[str, str]:
    """Status and detail of the check."""
    parts = [_likeness(profile)]
    if profile.costly:
        parts.append(f"{counted(len(profile.costly), 'gap')} at a cost, see the table")
    if profile.elsewhere:
        report = profile.report
        parts.append(
            f"the bucket is in {report.region}, and requests are signed for "
            f"{report.configured_region}: set region in url"
        )
    if left := profile.report.leftovers:
        parts.append(f"{counted(len(left), 'probe')} could not be removed, such as {left[0]}")
    noted = bool(profile.costly) or profile.elsewhere
    return "failed" if left else "note" if noted else "ok", "; ".join(parts)


def show(profile: Profile, out: Output) -> None:
    """The profile as a table for people."""
    rows = [
        (capability.means, seen.support.value, _consequence(capability, seen, cost))
        for capability, seen, cost in profile.rows()
    ]
    out.table("Store profile", ("Capability", "Here", "What a gap costs here"), rows)
    for name, (known, seen) in profile.differences.items():
        assert profile.known is not None
        out.line(f"{name}: {seen} here, {known} in {profile.known.title}")


def recorded(profile: Profile) -> dict[str, object]:
    """The profile for programs."""
    known = profile.known
    return {
        "server": profile.report.headers.get("server", ""),
        "region": profile.report.region,
        "configured_region": profile.report.configured_region,
        "known": known and {"name": known.name, "source": known.source, "version": known.version},
        "differences": {
            name: {"known": known_support, "seen": seen}
            for name, (known_support, seen) in profile.differences.items()
        },
        "capabilities": [
            {
                "name": capability.name,
                "support": seen.support,
                "detail": seen.detail,
                "cost": cost or None,
            }
            for capability, seen, cost in profile.rows()
        ],
    }


def _likeness(profile: Profile) -> str:
    known = profile.known
    if known is None:
        return "no server that is known here"
    how = "measured on" if known.source == "measured" else "documented,"
    like = f"like {known.title} ({how} {known.version})"
    if profile.differences:
        return f"{like}, but for {', '.join(profile.differences)}"
    return like


def _consequence(capability: Capability, seen: Seen, cost: str) -> str:
    if seen.support is Support.HONOURED:
        return seen.detail or "-"
    if seen.support is Support.UNKNOWN:
        return seen.detail
    said = f" ({seen.detail})" if seen.detail else ""
    return f"{cost}{said}" if cost else f"nothing: {capability.free}{said}"
