"""Frames: what is encoded is decoded again, and whatever else arrives ends in a DecodeError and nothing worse."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from srl.core.errors import DecodeError
from srl.streams.frames import KINDS, MAGIC, MAX_HEADER, Header, decode, encode, payload

fuzz = settings(deadline=None, max_examples=100, database=None)

INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBER = st.integers(-1, 2**53)
HEADERS = st.builds(
    Header,
    kind=st.sampled_from(sorted(KINDS)),
    sender=NUMBER,
    incarnation=NUMBER,
    sequence=NUMBER,
    number=NUMBER,
    version=NUMBER,
)
DTYPES = st.sampled_from(["|u1", "|b1", "<i2", "<i8", "<u4", "<f2", "<f4", "<f8"])
SHAPE = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPE))
VALUES = st.none() | st.booleans() | INT64 | st.text(max_size=9) | st.binary(max_size=9)


def shapes_of(arrays):
    return [(array.shape, array.dtype.str) for array in arrays]


@fuzz
@given(HEADERS, st.lists(ARRAYS, max_size=4))
@example(Header("block"), [np.array(3.5, "<f4"), np.zeros((0, 3), "<i8"), np.ones((2, 2), "|b1")])
def test_a_message_survives_the_journey(header, arrays):
    frames = [bytes(frame) for frame in encode(header, arrays)]
    found, rest = decode(frames)
    assert found == header
    for array, arrived in zip(arrays, payload(rest, shapes_of(arrays)), strict=True):
        assert (arrived.shape, arrived.dtype) == (array.shape, array.dtype)
        assert arrived.tobytes() == array.tobytes()


@fuzz
@given(ARRAYS)
def test_arrays_that_are_not_contiguous_arrive_in_order(array):
    turned = array.T
    [arrived] = payload([bytes(frame) for frame in encode(Header("block"), [turned])[1:]], shapes_of([turned]))
    assert arrived.tobytes() == turned.tobytes()


def test_contiguous_arrays_are_not_copied():
    array = np.zeros(8, "<i8")
    _, frame = encode(Header("block"), [array])
    array[3] = 7
    assert np.frombuffer(frame, "<i8")[3] == 7
    [arrived] = payload([frame], shapes_of([array]))
    assert np.shares_memory(arrived, array)


def test_what_arrived_cannot_be_written_to():
    [arrived] = payload([bytes(16)], [((2,), "<i8")])
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1


@fuzz
@given(HEADERS)
def test_every_header_fits_its_limit(header):
    assert len(encode(header)[0]) <= MAX_HEADER


def only_decode_errors(frames):
    """decode(), with every error but DecodeError let through."""
    try:
        header, rest = decode(frames)
    except DecodeError as error:
        assert str(error)
        return None
    assert header.kind in KINDS
    assert len(rest) == len(frames) - 1
    return header


@fuzz
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_frames_are_refused(frames):
    assert only_decode_errors(frames) is None


@fuzz
@given(st.binary(max_size=MAX_HEADER + 20))
def test_random_bytes_after_the_magic_are_refused_or_a_header(rest):
    only_decode_errors([MAGIC + rest])


@fuzz
@given(st.recursive(VALUES, st.lists, max_leaves=9))
@example(["hello", 1.5])
@example(["hello", "1"])
@example(["hello", None])
@example([None])
@example([])
@example({"kind": "hello"})
def test_other_msgpack_is_refused(value):
    found = only_decode_errors([MAGIC + msgspec.msgpack.encode(value)])
    assert found is None or (isinstance(value, list) and value[0] in KINDS)


@fuzz
@given(HEADERS, st.data())
def test_a_damaged_header_is_refused_or_another_header(header, data):
    whole = bytearray(encode(header)[0])
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    only_decode_errors([bytes(whole)])


@fuzz
@given(HEADERS, st.data())
def test_a_truncated_header_is_refused(header, data):
    [whole] = encode(header)
    assert only_decode_errors([whole[: data.draw(st.integers(0, len(whole) - 1))]]) is None


@pytest.mark.parametrize("field", ["sender", "incarnation", "sequence", "number", "version"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_a_number_that_fits_no_int64_is_refused(field, value):
    """Such a number passes for an int until somebody puts it into an array."""
    with pytest.raises(DecodeError):
        decode(encode(Header("hello", **{field: value})))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [MAGIC],
        [b"SRL2" + encode(Header("hello"))[0][4:]],
        [encode(Header("hello"))[0] + b"\x00"],
        [encode(Header("hello"))[0] + b"\x00" * 500],
        [MAGIC + b"\xdd\xff\xff\xff\xff"],  # a list of four billion
        [MAGIC + b"\x91\xdb\xff\xff\xff\xff"],  # a text of four gigabytes
        [MAGIC + b"\x91" * 120],
        [MAGIC + b"\x91\xa5\xffello"],  # a text that is no UTF-8
        encode(Header("explode")),
        encode(Header("")),
        [MAGIC + pickle.dumps(Header("hello"))],
        [pickle.dumps([1, 2, 3])],
    ],
)
def test_these_are_refused(frames):
    with pytest.raises(DecodeError):
        decode(frames)


SHAPES = [((2, 3), "<f4"), ((), "<i8"), ((5,), "|b1"), ((0, 4), "<f4")]
SIZES = [24, 8, 5, 0]


@pytest.mark.parametrize(
    ("place", "size"), [(0, 23), (0, 25), (0, 28), (0, 0), (1, 7), (1, 16), (2, 4), (2, 10), (3, 1), (3, 16)]
)
def test_one_array_too_long_or_too_short_is_refused(place, size):
    sizes = [*SIZES[:place], size, *SIZES[place + 1 :]]
    with pytest.raises(DecodeError):
        payload([bytes(size) for size in sizes], SHAPES)


@fuzz
@given(st.lists(st.binary(max_size=30), max_size=5))
@example([bytes(size) for size in SIZES])
@example([bytes(size) for size in SIZES[:-1]])
@example([bytes(size) for size in [*SIZES, 0]])
@example([bytes(size) for size in SIZES[::-1]])
def test_a_payload_has_exactly_the_expected_sizes_or_is_refused(frames):
    if [len(frame) for frame in frames] == SIZES:
        arrays = payload(frames, SHAPES)
        assert shapes_of(arrays) == SHAPES
        assert [array.tobytes() for array in arrays] == frames
    else:
        with pytest.raises(DecodeError):
            payload(frames, SHAPES)
