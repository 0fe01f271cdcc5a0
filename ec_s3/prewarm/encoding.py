"""The seam between a prewarm job and the vLLM that encodes for it.

Values and one protocol; imports no vLLM by itself. The job calls an encoder from
one thread at a time, never from its event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ec_s3.keys import Namespace

Modality = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One entry of a manifest.

    Attributes:
        line: its line in the manifest, counted from 1; of a folder's files their number in order.
        uri: where the media is: a path or `s3://bucket/key`.
        modality: what it is.
        uuid: the identifier that clients will send for it; None where vLLM hashes the content.
        processor: the processor's settings for this entry (`mm_processor_kwargs` of a request).
    """

    line: int
    uri: str
    modality: Modality
    uuid: str | None = None
    processor: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """An entry whose media has been read and processed.

    Attributes:
        item: the entry.
        identifier: what a server would call it (vLLM's `mm_hash`), the one of the object's key.
        others: identifiers of its further outputs: a video with its sound has two.
        num_embeds: rows of its encoder output.
        nbytes: size of its encoder output; 0 where only the encoder will tell.
        input_digest: what the encoder will be given, as the object's header has it
            (`connector.binding`); empty when unknown. It tells apart two entries that vLLM gives
            one identifier, for example two files with the same EXIF ImageID.
    """

    item: MediaItem
    identifier: str
    num_embeds: int
    nbytes: int = 0
    input_digest: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An entry that is not in the bucket, and why.

    Attributes:
        blameless: whether that is no fault of the media: the bucket or vLLM does not answer.
    """

    item: MediaItem
    reason: str
    blameless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """What a job's vLLM is started with; `ec_s3.connector.encoder.open_encoder` takes it.

    Attributes:
        model: vLLM's `--model`, spelled as the server spells it.
        arguments: further options of the server's command line, for example
            `("--dtype", "bfloat16", "--mm-processor-kwargs", "{...}")`.
        connector: settings of ec_s3 (`ec_connector_extra_config`), the bucket's `url` among them.
        workdir: folder for the encoder's own temporary files and logs.
        batch_size: most entries of one `identify`.
    """

    model: str
    arguments: tuple[str, ...] = ()
    connector: Mapping[str, object] = field(default_factory=dict)
    workdir: Path | None = None
    batch_size: int = 32


class Encoder(Protocol):
    """One vLLM in the encode-only producer role, in this or in another process.

    Attributes:
        namespace: where its outputs go.
        facts: what identifiers depend on but the namespace does not, as `namespace.json` has them.
    """

    @property
    def namespace(self) -> Namespace: ...  # noqa: D102  see Attributes

    @property
    def facts(self) -> Mapping[str, object]: ...  # noqa: D102  see Attributes

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        """What a server would call these entries; makes no call of the encoder model.

        One bad entry never fails the others.

        Args:
            items: the entries.
            data: their media, in the same order: its bytes, or the file that has them.

        Returns:
            One result an entry, in their order. What was identified may be kept until it is
            encoded or the next `identify`, but no longer.
        """
        ...

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        """Encode entries of the last `identify`, and wait until their uploads are in the bucket.

        Returns:
            One result an entry, in their order; what is not in the bucket afterwards is `Failed`.
        """
        ...

    def close(self) -> None:
        """End the vLLM; idempotent."""
        ...
