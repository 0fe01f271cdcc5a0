"""One vLLM encodes, another answers: they share nothing but the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3 import wire
from ec_s3.testing.vllm_process import known_image

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab

_SETTINGS = {"metadata_timeout": "10s"}


def test_consumer_answers_what_the_producer_encoded(lab: Lab) -> None:
    cold = lab.cold("qwen2-vl")
    prefix = "split"
    with_pixels, without_pixels = "china-0", "flower-1"

    producer = lab.start("qwen2-vl", prefix=prefix, role="ec_producer")
    produced = {name: lab.ask(producer, name) for name in (with_pixels, without_pixels)}
    producer.finish()
    assert len(lab.server.items(prefix)) == 2
    assert [answer.encoded for answer in produced.values()] == [1, 1]

    consumer = lab.start("qwen2-vl", prefix=prefix, role="ec_consumer", settings=_SETTINGS)
    seen = lab.ask(consumer, with_pixels)
    key = lab.moved(prefix)[1].key
    header, _ = wire.decode(lab.read(key), max_tensor_bytes=1 << 20)
    grid = {"image_grid_thw": [1, 16, 14]}  # patches of 14 x 14 pixels in a picture of 196 x 224
    known = lab.ask_with(consumer, known_image(header.identifier, grid))
    unknown = lab.ask_with(consumer, known_image("no-such-item", grid))
    after = lab.ask(consumer, "hopper-0")
    consumer.finish()

    assert (seen.encoded, seen.tokens) == (0, cold.answers[with_pixels].tokens)
    assert (known.encoded, known.tokens) == (0, cold.answers[without_pixels].tokens)
    assert (unknown.finish_reason, unknown.tokens) == ("error", ())
    assert (after.encoded, after.tokens) == (1, cold.answers["hopper-0"].tokens)
