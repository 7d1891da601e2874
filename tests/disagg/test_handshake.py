"""Two workers that do not fit refuse each other, with the reason, before any request."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bifolio.checkpoint.source import ORIGIN, ModelSource
from bifolio.disagg.handshake import agree, handed_writer, model_print, page_shape, page_spec
from bifolio.disagg.protocol import Offer, Role, WorkerHello
from bifolio.errors import PairError
from bifolio.formats import CacheFormat
from bifolio.spec import PageSpec
from bifolio.spec.page import LatentShape
from support.handoff_pair import Pair, make_pair
from support.handoff_pools import MODEL, DecodePool, PrefillPool, kernels, make_request, tiny_spec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LATENT = PageSpec(3, 1, 96, CacheFormat.parse("bf16"), 16, latent=LatentShape(64, 32, 16, (0, 2)))


def hellos(**changes: Any) -> tuple[WorkerHello, WorkerHello]:
    """Of a pair that fits, but for `changes` of the decode side."""
    source = PrefillPool(tiny_spec(), 2, kernels()).hello()
    target = DecodePool(tiny_spec(), 2, kernels()).hello()
    return source, msgspec.structs.replace(target, **changes)


def spec(**changes: Any) -> PageSpec:
    fields = {"layers": 1, "kv_heads": 1, "head_dim": 16, "cache": CacheFormat.parse("bf16")}
    return PageSpec(**(fields | {"page_size": 16} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "protocol version differs: 2 is not 1"),
        ({"role": Role.PREFILL}, "both workers are prefill"),
        ({"region": "us"}, "region differs: 'eu' is not 'us'"),
        ({"model": msgspec.structs.replace(MODEL, weights="x")}, "model weights differs"),
        ({"model": msgspec.structs.replace(MODEL, tokenizer="x")}, "model tokenizer differs"),
        ({"model": msgspec.structs.replace(MODEL, config="x")}, "model config differs"),
        ({"page": page_shape(spec(layers=2))}, "layers=1 cannot become pages with layers=2"),
        ({"page": page_shape(spec(kv_heads=2))}, "kv_heads=1 cannot become"),
        ({"page": page_shape(spec(head_dim=32))}, "head_dim=16 cannot become"),
        ({"page": page_shape(spec(world=2))}, "world=1 cannot become pages with world=2"),
        ({"page": page_shape(LATENT)}, "cannot become"),
        ({"slots": 0}, "0 staging slots"),
        ({"slots": 10**9}, "1000000000 staging slots"),
        ({"scales": b"1234"}, "a bf16 cache has no static scales"),
    ],
)
def test_each_thing_that_differs_is_named(changes: dict[str, Any], reason: str) -> None:
    one, other = hellos(**changes)
    with pytest.raises(PairError, match=reason):
        agree(one, other)


def test_a_prefill_worker_without_a_writer_is_malformed() -> None:
    one, other = hellos()
    with pytest.raises(PairError, match="malformed"):
        agree(msgspec.structs.replace(one, writer=0), other)


def test_formats_and_page_sizes_may_differ_and_the_codec_is_named_alike_on_both_sides() -> None:
    for cache, size in [("fp8", 16), ("fp8:token", 32), ("bf16", 256)]:
        target = spec(cache=CacheFormat.parse(cache), page_size=size)
        one, other = hellos(page=page_shape(target))
        assert agree(one, other) == agree(other, one)
        assert agree(one, other).name.startswith(f"bf16>{cache} 16>{size} ")


@pytest.mark.parametrize("scales", [(1.0, 0.0), (1.0, -1.0), (1.0, float("nan")), (1.0,)])
def test_static_scales_must_be_possible(scales: tuple[float, ...]) -> None:
    target = page_shape(spec(cache=CacheFormat.parse("fp8")))
    one, other = hellos(page=target, scales=struct.pack(f"<{len(scales)}f", *scales))
    with pytest.raises(PairError, match="static scales"):
        agree(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"kv_heads": 2**40},
        {"page_size": 17},
        {"cache": "fp7"},
        {"world": 0},
        {"fingerprint": "0" * 32},
        {"head_dim": 32},  # so the fingerprint no longer follows from the rest
    ],
)
def test_pages_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    shape = msgspec.structs.replace(page_shape(spec()), **changes)
    with pytest.raises(PairError):
        page_spec(shape)


def test_a_page_spec_comes_through_as_it_is() -> None:
    for one in (spec(), spec(cache=CacheFormat.parse("fp8:token"), page_size=64), LATENT):
        assert page_spec(page_shape(one)) == one


def test_the_writer_of_arrived_pages_tells_apart_all_that_changes_their_bytes() -> None:
    plain, token, larger = spec(), spec(cache=CacheFormat.parse("fp8:token")), spec(page_size=32)
    for scales in (b"", b"1234"):
        assert handed_writer(5, plain, plain, scales, scales) == 5, "unchanged pages keep it"
    found = {
        handed_writer(writer, source, target, b"", scales)
        for writer in (5, 6)
        for source, target in ((plain, token), (plain, larger), (larger, token))
        for scales in (b"", b"1234")
    }
    assert len(found) == 12
    assert 0 not in found


def test_a_compressed_checkpoint_is_a_pair_with_what_it_was_made_from(tmp_path: Path) -> None:
    folders = {"original": {}, "compressed": {ORIGIN: "w1"}, "stranger": {ORIGIN: "w3"}}
    prints = {}
    for (name, more), loaded in zip(folders.items(), ("w1", "w2", "w1"), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | more))
        prints[name] = model_print(ModelSource(name, tmp_path / name), loaded)
    assert prints["original"] == prints["compressed"]
    assert prints["original"].weights != prints["stranger"].weights


# ── over a connection ───────────────────────────────────────────────────────────────────────────


def opened(pair: Pair) -> Pair:
    pair.poll(5)
    return pair


def test_a_pair_that_does_not_fit_is_not_ready_on_either_side_and_says_why() -> None:
    pair = make_pair(hello_changes={"region": "us"})
    opened(pair)
    for side in (pair.prefill, pair.decode):
        assert not side.ready
        assert side.connection.refused
        assert "region differs" in side.connection.reason
    request = make_request("a", [1] * 20)
    pair.offer(request)
    pair.poll()
    assert "region differs" in pair.failed("a").message


def test_a_decode_worker_refuses_pages_of_a_second_writer() -> None:
    pair = make_pair()
    pair.target.reservations.bind(123)
    opened(pair)
    assert pair.prefill.connection.refused
    assert "another prefill worker" in pair.prefill.connection.reason
    assert not pair.decode.ready


def test_another_secret_is_refused_without_a_word_about_it() -> None:
    pair = opened(make_pair(secrets=(b"one", b"two")))
    assert pair.prefill.connection.closed
    assert pair.decode.connection.closed
    assert "secret" in pair.decode.connection.reason


def test_a_peer_that_never_gets_ready_is_given_up() -> None:
    pair = make_pair()
    pair.prefill.poll()  # and never again in time
    pair.now += 100
    pair.poll(2)
    assert pair.prefill.connection.closed
    assert pair.decode.connection.closed


def test_offers_are_read_without_fields_of_later_builds_and_with_them() -> None:
    offer = Offer(transfer=1, request=make_request("a", [1, 2]), deadline=3.0)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(offer))
    assert wire["request"].pop("timeout") is None  # `deadline` says it to builds that lack it
    wire["request"]["of a later build"] = 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Offer) == offer
