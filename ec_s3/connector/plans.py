"""What the workers are to load and save in the step that is being scheduled.

Belongs to the scheduler part and runs on its thread. A load that is planned is never dropped, as
vLLM counts on it; a save is, when vLLM does not encode its item after all, and its pages are given
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ec_s3.connector.media import Kind
from ec_s3.connector.messages import LoadOrder, SaveOrder
from ec_s3.types import ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.binding import Binding
    from ec_s3.connector.holds import Holds
    from ec_s3.connector.media import Classifier, MediaItem
    from ec_s3.connector.state import Held, Seen, Setup


class Plans:
    """Orders until they are taken.

    Args:
        setup: what is fixed.
        holds: the table of held items.
        classifier: knows what lays an item out.
        binding: the digest of an item's inputs, which may still be on its way.

    Attributes:
        loads: those planned and not yet taken.
    """

    def __init__(
        self,
        setup: Setup,
        holds: Holds,
        classifier: Classifier,
        *,
        binding: Callable[[Seen, MediaItem], Binding],
    ) -> None:
        self._setup = setup
        self._holds = holds
        self._classifier = classifier
        self._binding = binding
        self.loads: list[LoadOrder] = []
        self._saves: list[tuple[SaveOrder, str, int]] = []

    def load(self, request_id: str, seen: Seen, item: MediaItem, held: Held) -> None:
        """Every rank loads the item."""
        transfer = self._holds.start_transfer(item.name, held)
        assert held.spec is not None  # a promise is only made of what is ready
        self.loads.append(LoadOrder(transfer, item.identifier, held.spec, held.extents))
        if item.kind is Kind.MEDIA:
            self._holds.let_go(request_id, seen, item.name)

    def save(
        self,
        request: Any,
        index: int,
        request_id: str,
        seen: Seen,
        *,
        encoded_from: Binding | None = None,
        audit: bool = False,
    ) -> None:
        """Save an item, if there are pages for it.

        Args:
            request: whose item it is.
            index: which one.
            request_id: the request's.
            seen: what is remembered of the request.
            encoded_from: inputs that it was encoded of in a step before; None: it is encoded now.
            audit: it is only to be compared with what is stored.
        """
        item = seen.items[index]
        grant = self._holds.take_grant(item)
        if grant is None:
            return
        ticket, extents = grant
        spec = TensorSpec(self._setup.dtype, (item.rows, self._setup.widths[item.modality]))
        meta = ItemMeta(placeholder=self._classifier.placeholder(request.mm_features[index]))
        binding = encoded_from or self._binding(seen, item)
        self._holds.expect_save(ticket, item.name, spec, meta=meta, binding=binding, audit=audit)
        if not audit:
            seen.saved[item.identifier] = ticket
        order = SaveOrder(ticket, item.identifier, spec, extents, encoded_from is not None)
        self._saves.append((order, request_id, index))

    def take(self, output: Any) -> tuple[list[LoadOrder], list[SaveOrder]]:
        """The step's orders; what is not to be saved in it never will be."""
        # The V1 runner throws an idle step's metadata away: its loads go with the next one.
        idle = self._setup.consumer and not output.total_num_scheduled_tokens
        planned, self._saves = self._saves, []
        saves = []
        for order, request_id, index in planned:
            encoded = index in output.scheduled_encoder_inputs.get(request_id, ())
            if (encoded or order.cached) and not idle:
                saves.append(order)
            else:
                self._holds.give_back(order.ticket)
        loads: list[LoadOrder] = []
        if not idle:
            loads, self.loads = self.loads, []
        return loads, saves
