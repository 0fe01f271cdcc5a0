"""Gate: what a change forbids to those who began before it."""

from __future__ import annotations

from dataclasses import replace

from ec_s3.control import Control
from ec_s3.gate import Gate
from ec_s3.keys import Namespace, identifier_digest
from ec_s3.types import MissReason

NAMESPACE = Namespace(model="org/model", salt="secret")
KEY = NAMESPACE.object_key("a")


def test_an_open_gate_lets_everything_pass() -> None:
    gate = Gate(NAMESPACE)
    assert gate.now.namespace is NAMESPACE
    assert gate.refusal(KEY, gate.now) is None
    assert gate.upload_refusal(KEY) is None


def test_nothing_passes_while_suspended_and_nothing_from_before_afterwards() -> None:
    gate = Gate(NAMESPACE)
    before = gate.now
    assert gate.suspend()
    during = gate.now
    assert gate.suspended
    assert {gate.refusal(KEY, since) for since in (before, during)} == {MissReason.SUSPENDED}
    assert gate.resume("step-2")
    assert {gate.refusal(KEY, since) for since in (before, during)} == {MissReason.SUSPENDED}
    assert gate.refusal(gate.now.namespace.object_key("a"), gate.now) is None
    assert gate.now.namespace == replace(NAMESPACE, weight_version="step-2")
    assert gate.now.weights == 2


def test_saying_it_twice_changes_nothing() -> None:
    gate = Gate(NAMESPACE)
    assert not gate.resume("")
    gate.suspend()
    now = gate.now
    assert not gate.suspend()
    assert gate.now is now
    gate.resume("x")
    now = gate.now
    assert not gate.resume("x")
    assert gate.now is now
    assert gate.resume("y"), "without a suspension the weights may change all the same"


def test_the_same_weights_may_be_resumed() -> None:
    gate = Gate(NAMESPACE)
    before = gate.now
    gate.suspend()
    assert gate.resume("")
    assert gate.now.namespace == NAMESPACE
    assert gate.refusal(KEY, before) is MissReason.SUSPENDED


def test_uploads_of_the_weights_in_use_go_on_while_suspended_and_end_with_them() -> None:
    gate = Gate(NAMESPACE)
    gate.suspend()
    assert gate.upload_refusal(KEY) is None
    gate.resume("next")
    assert gate.upload_refusal(KEY) == "superseded"
    assert gate.upload_refusal(gate.now.namespace.object_key("a")) is None


def test_a_namespace_that_begins_alike_is_another_one() -> None:
    gate = Gate(NAMESPACE)
    assert gate.upload_refusal(f"{NAMESPACE.prefix}0/bfloat16/00/{'0' * 64}") == "superseded"


def test_the_kill_switch_closes_and_opens() -> None:
    gate = Gate(NAMESPACE)
    before = gate.now
    gate.apply(Control(enabled=False))
    assert gate.refusal(KEY, gate.now) is MissReason.DISABLED
    assert gate.upload_refusal(KEY) == "disabled"
    gate.apply(Control())
    assert gate.refusal(KEY, gate.now) is None
    assert gate.refusal(KEY, before) is not None, "what began before may not be kept"


def test_weights_changed_while_switched_off_are_others_when_it_is_on_again() -> None:
    gate = Gate(NAMESPACE)
    gate.apply(Control(enabled=False))
    gate.suspend()
    gate.resume("next")
    assert gate.refusal(KEY, gate.now) is MissReason.DISABLED
    gate.apply(Control())
    assert gate.now.closed is None
    assert gate.now.namespace.weight_version == "next"


def test_a_deletion_holds_until_it_expires_and_disturbs_nobody_else() -> None:
    now = 0.0
    gate = Gate(NAMESPACE, wall_clock=lambda: now)
    since = gate.now
    gate.apply(Control(deleted={identifier_digest("a"): 100.0}))
    assert gate.refusal(KEY, since) is MissReason.DELETED
    assert gate.upload_refusal(KEY) == "deleted"
    assert gate.refusal(NAMESPACE.object_key("b"), since) is None
    now = 100.0
    assert gate.refusal(KEY, since) is None
    assert gate.upload_refusal(KEY) is None


def test_a_later_valid_after_time_outdates_what_began_before() -> None:
    gate = Gate(NAMESPACE)
    before = gate.now
    gate.apply(Control(valid_after=5.0))
    assert gate.refusal(KEY, before) is MissReason.STALE
    assert gate.refusal(KEY, gate.now) is None
