"""What vLLM has already costs the bucket nothing; media of other kinds are cached like pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.testing.vllm_process import image, prompt, token_ids, video

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab

_SMALL = {
    "block_size": 32,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 2,
}
"""Blocks that a short prompt fills, and an encoder cache of vLLM's own for four pictures."""

_TWO_ITEMS = {"max_local_cpu_size": "512KiB"}
"""A host tier for two pictures."""


def test_what_vllm_has_computed_or_cached_is_not_asked_for(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "reuse"
    picture, *others = cold.keys
    lab.copy(cold, prefix, pictures=cold.keys)
    media = image(lab.pictures[picture])

    def requests() -> int:
        return len(lab.server.served(prefix))

    process = lab.start(prefix=prefix, settings=_TWO_ITEMS, llm=_SMALL)
    first = lab.ask(process, picture)
    lab.ask(process, others[0])
    lab.ask(process, others[1])  # the host tier holds the picture no more, vLLM's cache does
    before = requests()
    cached = process.generate([prompt(media, text="and now, in other words: what is it?")])
    assert (requests() - before, cached["encoder_items"]) == (0, 0)
    for other in others[2:8]:  # vLLM's cache holds it no more either, the prefix cache does
        lab.ask(process, other)
    before = requests()
    computed = lab.ask(process, picture)
    assert (requests() - before, computed.encoded) == (0, 0)
    reworded = process.generate([prompt(media, text="and now, in other words: what is it?")])
    assert (requests() - before, reworded["encoder_items"]) == (0, 0)
    anew = process.generate([prompt(media, text="say once more: what is it?")])
    fetched = lab.server.served(prefix)[-1]
    process.finish()

    assert (first.encoded, first.tokens) == (0, cold.answers[picture].tokens)
    assert computed.tokens == first.tokens
    assert token_ids(reworded) == token_ids(cached)
    assert anew["encoder_items"] == 0
    assert (fetched.method, fetched.moved_item) == ("GET", True), "the control: nobody has it"


def test_one_picture_many_times_in_one_batch_is_moved_once(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "repeated"
    new, stored = "china-0", "hopper-1"
    lab.copy(cold, prefix, pictures=[stored])
    before = len(lab.moved(prefix))
    a, b = (image(lab.pictures[name]) for name in (new, stored))

    process = lab.start(prefix=prefix)
    batch = process.generate([prompt(a, b, a), prompt(a), prompt(b), prompt(b, b)])
    lab.wait_for_uploads(prefix, 2)  # the copy was one
    process.finish()

    assert batch["encoder_items"] == 1
    answers = token_ids(batch)
    assert answers[1:3] == [list(cold.answers[name].tokens) for name in (new, stored)]
    moved = lab.moved(prefix)[before:]
    assert sorted(r.method for r in moved) == ["GET", "PUT"]
    assert {r.key.rpartition("/")[2] for r in moved} == {
        cold.keys[name].rpartition("/")[2] for name in (new, stored)
    }


def test_video_is_encoded_once_and_answers_alike_in_the_next_process(lab: Lab) -> None:
    prefix = "video"
    frames = [lab.pictures[name] for name in ("china-0", "flower-0", "hopper-0", "china-0")]
    shown, backwards = video(*frames), video(*reversed(frames))

    process = lab.start("qwen2-vl", prefix=prefix)
    encoded = [lab.ask_with(process, media) for media in (shown, backwards)]
    lab.wait_for_uploads(prefix, 2)
    process.finish()
    process = lab.start("qwen2-vl", prefix=prefix)
    loaded = [lab.ask_with(process, media) for media in (shown, backwards)]
    process.finish()

    assert [answer.encoded for answer in encoded] == [1, 1]
    assert [answer.encoded for answer in loaded] == [0, 0]
    assert [answer.tokens for answer in loaded] == [answer.tokens for answer in encoded]
    assert encoded[0].tokens != encoded[1].tokens
