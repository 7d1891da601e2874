"""Formats and plans: one spelling each, exact bytes, refusals that name the cure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.errors import ConfigError
from bifolio.formats import CacheFormat, Number, Phase, PhasePlan, PrecisionPlan, WeightFormat

WEIGHTS = [
    "bf16",
    "fp32",
    "fp8",
    "fp8:channel",
    "fp8:tensor",
    "int8",
    "int8:g32",
    "int8:a8",
    "int8:g32:a8",
    "int4:g32",
    "int4:g64",
    "int4:g128",
    "int4:g32:z",
    "int4:g64:z",
    "int4:g128:z",
    "int4:g32:a8",
    "int4:g64:a8",
    "int4:g128:a8",
    "int4:g32:z:a8",
    "int4:g64:z:a8",
    "int4:g128:z:a8",
]
CACHES = ["bf16", "fp8", "fp8:token", "fp32"]


@pytest.mark.parametrize("text", WEIGHTS)
def test_a_weight_format_is_spelled_as_it_is_read(text: str) -> None:
    assert str(WeightFormat.parse(text)) == text


@pytest.mark.parametrize("text", CACHES)
def test_a_cache_format_is_spelled_as_it_is_read(text: str) -> None:
    assert str(CacheFormat.parse(text)) == text


def test_spellings_name_formats_one_to_one() -> None:
    assert len({WeightFormat.parse(text) for text in WEIGHTS}) == len(WEIGHTS)
    assert WeightFormat.parse("fp8:b128") == WeightFormat.parse("fp8")
    assert WeightFormat.parse(" INT4:G32:A8 ") == WeightFormat.parse("int4:g32:a8")


@pytest.mark.parametrize(
    "text",
    ["", "int4", "int4:g16", "int4:a8:g32", "fp8:a8", "bf16:a8", "int4:g32:a8:z", "fp4", "auto"],
)
def test_an_unknown_weight_format_is_refused_with_where_the_known_ones_stand(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown weight format .*int4:g32:a8") as caught:
        WeightFormat.parse(text)
    assert str(caught.value).endswith("docs/formats.md")
    assert len(str(caught.value)) < 170


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("int4", "int4:g32"),
        ("int4:g33", "int4:g32"),
        ("int4:a8", "int4:g32:a8"),
        ("int4:a8:g64", "int4:g64:a8"),
        ("int4:g64:a8:z", "int4:g64:z:a8"),
        ("int8:g64", "int8:g32"),
        ("int9", "int8"),
        ("fp16", "bf16"),
        ("BF16:A8", "bf16"),
        ("fp8:chanel", "fp8:channel"),
    ],
)
def test_the_nearest_weight_format_is_named(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {near}\?"):
        WeightFormat.parse(text)


def test_nothing_is_named_where_nothing_is_near() -> None:
    with pytest.raises(ConfigError, match=r"unknown weight format 'nvfp4x2'; formats are"):
        WeightFormat.parse("nvfp4x2")


@pytest.mark.parametrize("text", ["bf16:a8", "fp8:a8", "fp8:channel:a8"])
def test_what_has_int8_activations_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=":a8 belongs to int8 and int4"):
        WeightFormat.parse(text)


@pytest.mark.parametrize("text", ["", "int8", "fp8:channel", "e4m3", "fp16"])
def test_an_unknown_cache_format_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown cache format .*bf16, fp8, fp8:token"):
        CacheFormat.parse(text)


@pytest.mark.parametrize(
    ("text", "codes", "scales"),
    [
        # a matrix of 200 x 300: no group, block or byte divides it
        ("bf16", 200 * 300 * 2, 0),
        ("fp32", 200 * 300 * 4, 0),
        ("fp8:tensor", 200 * 300, 4),
        ("fp8:channel", 200 * 300, 200 * 4),
        ("fp8", 200 * 300, 2 * 3 * 4),
        ("int8", 200 * 300, 200 * 2),
        ("int8:g32:a8", 200 * 300, 200 * 10 * 2),
        ("int4:g32", 200 * 150, 200 * 10 * 2),
        ("int4:g64", 200 * 150, 200 * 5 * 2),
        ("int4:g128:z", 200 * 150, 200 * 3 * 2 * 2),
    ],
)
def test_a_weight_matrix_has_the_bytes_of_its_codes_and_scales(
    text: str, codes: int, scales: int
) -> None:
    weight_format = WeightFormat.parse(text)
    assert weight_format.code_bytes(200, 300) == codes
    assert weight_format.scale_bytes(200, 300) == scales
    assert weight_format.nbytes(200, 300) == codes + scales


def test_a_row_of_int4_codes_starts_on_a_byte_and_ends_in_a_short_group() -> None:
    int4 = WeightFormat.parse("int4:g32")
    assert int4.groups(64) == 2
    assert int4.groups(65) == 3
    assert int4.code_bytes(3, 65) == 3 * 33


def test_zero_points_and_activations_change_no_code_byte() -> None:
    for text in ("int4:g64:z", "int4:g64:a8"):
        assert WeightFormat.parse(text).code_bytes(7, 130) == 7 * 65
    assert WeightFormat.parse("int4:g64:a8").nbytes(7, 130) == WeightFormat.parse(
        "int4:g64"
    ).nbytes(7, 130)


@pytest.mark.parametrize(
    ("text", "group"), [("int4:g32:a8", 32), ("int4:g128:a8", 64), ("int8:a8", 64)]
)
def test_activations_share_a_scale_within_a_weight_group(text: str, group: int) -> None:
    assert WeightFormat.parse(text).activation_group == group


@pytest.mark.parametrize(
    ("text", "bytes_of_64"), [("bf16", 128), ("fp32", 256), ("fp8", 64), ("fp8:token", 66)]
)
def test_a_cached_vector_has_the_bytes_of_its_numbers_and_scale(
    text: str, bytes_of_64: int
) -> None:
    assert CacheFormat.parse(text).vector_bytes(64) == bytes_of_64


def test_only_plain_fp8_has_static_scales() -> None:
    assert [text for text in CACHES if CacheFormat.parse(text).static_scales] == ["fp8"]


def test_a_plan_for_both_phases_and_one_for_each() -> None:
    plan = PrecisionPlan.parse("int4:g32:a8/fp8")
    assert plan.prefill == plan.decode
    assert plan.phase(Phase.DECODE).weights == WeightFormat.parse("int4:g32:a8")
    two = PrecisionPlan.parse(prefill="fp8/bf16", decode="int4:g32:a8/bf16")
    assert str(two.phase(Phase.PREFILL)) == "fp8/bf16"
    assert str(two.phase(Phase.DECODE)) == "int4:g32:a8/bf16"


@pytest.mark.parametrize("arrow", ["->", " → "])
def test_one_text_with_an_arrow_speaks_for_each_phase(arrow: str) -> None:
    plan = PrecisionPlan.parse(f"fp8/bf16{arrow}weights=int4:g32,page=32")
    assert plan == PrecisionPlan.parse(prefill="fp8/bf16", decode="weights=int4:g32,page=32")
    assert (str(plan.prefill), str(plan.decode)) == ("fp8/bf16", "int4:g32/bf16")
    own = PrecisionPlan.parse(f"fp8/bf16{arrow}int4:g32/fp8", decode="cache=bf16")
    assert own == PrecisionPlan.parse(prefill="fp8/bf16", decode="int4:g32/bf16")


def test_a_phase_of_its_own_overrides_the_plan_key_by_key() -> None:
    plan = PrecisionPlan.parse("int8/fp8", decode="weights=int4:g64,head=int8")
    assert str(plan.prefill) == "int8/fp8"
    assert str(plan.decode) == "weights=int4:g64,cache=fp8,head=int8"


def test_what_a_plan_leaves_out_is_as_stored_in_bf16_pages_of_16() -> None:
    assert PrecisionPlan.parse() == PrecisionPlan()
    plan = PrecisionPlan.parse("auto/bf16")
    assert plan.prefill == PhasePlan() and plan.page_size == 16
    assert PrecisionPlan.parse("page=32").page_size == 32
    assert PrecisionPlan.parse("int8").prefill.cache.number is Number.BF16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plan": "weights=bf16,kv=fp8"}, r"cannot read 'kv=fp8'.*weights=…,experts=…,cache=…"),
        ({"plan": "fp8,page=32"}, r"cannot read 'fp8' .*: weights=fp8,page=32$"),
        ({"plan": "int8/bf16,page=17"}, r"theirs too: weights=int8,cache=bf16,page=17$"),
        ({"plan": "page=8, int8/bf16"}, r"theirs too: page=8,weights=int8,cache=bf16$"),
        ({"plan": "int8/,page=17"}, r"write weights=…,experts=…,cache=…"),
        ({"plan": "weights=,cache=fp8"}, r"cannot read 'weights='"),
        ({"plan": "cache=fp8,cache=bf16"}, r"duplicate key cache="),
        ({"plan": "page=0"}, r"page=0 .* not a number of tokens"),
        ({"plan": "page=-16"}, r"not a number of tokens"),
        ({"plan": "page=sixteen"}, r"not a number of tokens"),
        ({"plan": "/fp8"}, r"unknown weight format ''"),
        ({"plan": "bf16/"}, r"unknown cache format ''"),
        ({"plan": "bf16/bf16->"}, r"a phase is missing .*write PREFILL->DECODE"),
        ({"plan": "bf16/bf16->int8/bf16->fp8/bf16"}, r"unknown cache format 'bf16→fp8/bf16'"),
        ({"plan": "bf16/fp8/fp8"}, r"unknown cache format 'fp8/fp8'"),
        ({"prefill": "page=16", "decode": "page=32"}, r"same for both phases, not \[16, 32\]"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_with_the_cure(
    options: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        PrecisionPlan.parse(**options)


phases = st.builds(
    PhasePlan,
    weights=st.one_of(st.none(), st.sampled_from(WEIGHTS).map(WeightFormat.parse)),
    cache=st.sampled_from(CACHES).map(CacheFormat.parse),
    head=st.one_of(st.none(), st.sampled_from(WEIGHTS).map(WeightFormat.parse)),
)


@given(prefill=phases, decode=phases)
def test_every_phase_is_spelled_as_it_is_read(prefill: PhasePlan, decode: PhasePlan) -> None:
    plan = PrecisionPlan.parse(prefill=str(prefill), decode=str(decode))
    assert (plan.prefill, plan.decode) == (prefill, decode)
