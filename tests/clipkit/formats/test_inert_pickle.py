"""Tests of the pickle reader: builds only plain values, ends soon, and rejects invalid programs."""

import io
import pickle
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from clipkit.errors import CheckpointError
from clipkit.formats import weights
from clipkit.formats.weights import Opaque, ScriptObject, read_pickle


def load(content: bytes, *, script: bool = False) -> object:
    return read_pickle(io.BytesIO(content), script=script, origin="x")


def refused(content: bytes, *, script: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(content, script=script)
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()
    return str(caught.value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner, max_size=5).map(tuple)
    ),
)


@given(value=plain, protocol=st.sampled_from([2, 3, 4, 5]))
@settings(deadline=None)
def test_plain_values_round_trip(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


def test_consecutive_pickles_are_read_from_a_stream() -> None:
    stream = io.BytesIO(pickle.dumps(1, 2) + pickle.dumps("b", 2) + b"rest")
    assert [read_pickle(stream, origin="x") for _ in range(2)] == [1, "b"]
    assert stream.read() == b"rest"


def test_other_objects_are_opaque_or_omitted() -> None:
    assert isinstance(load(pickle.dumps({1, 2}, 4)), Opaque)
    assert isinstance(load(pickle.dumps(torch.device("cpu"), 2)), Opaque)
    assert load(pickle.dumps({1: "a", "b": 2, (1, 2): 3}, 2)) == {"b": 2}
    assert load(pickle.dumps(torch.Size([2, 3]), 2)) == (2, 3)
    assert load(pickle.dumps(OrderedDict(a=1), 2)) == {"a": 1}


def test_state_does_not_change_existing_objects() -> None:
    state = pickle.dumps({"__class__": 1, "update": 2}, 2)[2:-1]
    assert load(b"\x80\x02ccollections\nOrderedDict\n)R" + state + b"b.") == {}
    assert refused(b"\x80\x02ccollections\nOrderedDict\n" + state + b"b.")  # the class, not an instance
    assert refused(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN" + state + b"\x86b.")
    assert not hasattr(OrderedDict(), "__x__") and OrderedDict().update is not None
    found = load(b"\x80\x02c__torch__\nM\n)\x81" + state + b"b.", script=True)
    assert isinstance(found, ScriptObject) and found.state == {"__class__": 1, "update": 2}
    assert type(found) is ScriptObject and found.class_name == "__torch__.M"


@pytest.mark.parametrize(
    "name",
    [
        "os system", "posix system", "builtins eval", "__builtin__ eval", "builtins getattr", "torch load",
        "torch hub.load", "torch.storage _load_from_bytes", "torch.jit load",
        "collections OrderedDict.fromkeys", "torch._utils __builtins__",
        "numpy.core.multiarray _reconstruct", "torch._utils _rebuild_wrapper_subclass", "__torch__ M",
        "__main__ X", "torch._C _nn", "torch QInt8Storage", " ", "collections.OrderedDict __init__",
        "a\x1b[2J b",
    ],
)  # fmt: skip
def test_disallowed_names_are_rejected(name: str) -> None:
    module, attribute = name.split(" ", 1)
    for content in (
        b"\x80\x02c" + module.encode() + b"\n" + attribute.encode() + b"\n.",
        b"\x80\x04"
        + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute))
        + b"\x93.",
    ):
        assert f"names {module + '.' + attribute!r}" in refused(content)


@pytest.mark.parametrize(
    "content",
    [
        b"", b".", b"\x80", b"\x80\x02", b"\x80\x02N", b"N0.", b"N2.", b"(.", b"t.", b"N\x86.", b"a.",
        b"Ns.", b"NNNs.", b"}(Nu.", b"](Nu.", b"}Na.", b"h\x00.", b"j\xff\xff\xff\xff.", b"q\x00.",
        b"X\xff\xff\xff\xffa.", b"U\x05a.", b"T\xff\xff\xff\xffa.", b"\x8a\xff.",
        b"\x8b\x01\x00\x00\x00a.", b"K.", b"G\x00.", b"cos\n.", b"cos\nsystem.", b"c\xff\n\xff\n.",
        b"NNR.", b"N)R.", b"N)\x81.", b"Q.", b"NQ.", b")Q.", b"(NNNNNtQ.", b"NN\x93.", b"}}\x93.",
        b"ios\nsystem\n.", b"(cos\nsystem\no.", b"\x82\x01.", b"P1\n.", b"S'a'\n.", b"I1\n.", b"V\\q\n.",
        b"\x95\xff.", b"\x8d" + b"\xff" * 8 + b".", b"\x8e" + b"\xff" * 8 + b".",
        b"\x96" + b"\xff" * 8 + b".", b"B\xff\xff\xff\xff.", b"]b.", b"N}b.", b"ctorch\nFloatStorage\n}b.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.", b"\x97.", b"\xff.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(NNNNtR.", b"ctorch\nSize\n)R.",
        b"ccollections\nOrderedDict\nK\x01\x85R.",
    ],
)  # fmt: skip
def test_damaged_pickles_are_rejected(content: bytes) -> None:
    refused(content)


def test_long_name_gives_a_short_error() -> None:
    assert refused(b"c" + b"a" * 5000 + b"\nb\n.")
    assert len(refused(b"c" + b"a" * 900 + b"\nb\n.")) < 400


@pytest.mark.parametrize("level", [b"\x85", b"q\x00h\x00\x86", b"]q\x00(h\x00e", b"}X\x00\x00\x00\x00"])
def test_deep_nesting_does_not_overflow_the_stack(level: bytes) -> None:
    opened = {
        b"\x85": b"N" + b"\x85" * 200_000,
        b"}X\x00\x00\x00\x00": level * 100_000 + b"N" + b"s" * 100_000,
    }
    value = load(opened.get(level, b"]" + level * 20_000) + b".")
    del value  # deletion must not recurse either


def test_deeply_nested_key_is_not_hashed() -> None:
    assert load(b"}N" + b"\x85" * 200_000 + b"Ns.") == {}


def test_long_repeated_arguments_are_rejected() -> None:
    """Copying a long text or tuple in each of many instructions would take hours."""
    long_name, numbers = b"X" + (5000).to_bytes(4, "little") + b"a" * 5000, b"(" + b"K\x01" * 200 + b"t"
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x01tQ"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    assert refused(b"X\x09\x00\x00\x00__torch__" + long_name + b"\x93.", script=True)
    assert refused(b"ctorch\nSize\n" + numbers + b"R.")
    assert refused(numbers + b"Q.")
    assert refused(rebuild + b"(" + storage + b"K\x00" + numbers + numbers + b"\x89NtR.")
    typed = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + rebuild + b"ctorch\nTensor\n"
    assert refused(typed + numbers + b"NtR.")
    assert refused(b"ccollections\nOrderedDict\n](](U\x01aK\x01ee\x85R.")  # as written by Python 2


def test_self_referencing_list_is_read() -> None:
    value: Any = load(b"]q\x00h\x00a.")
    assert value[0] is value


def test_large_memo_index_takes_no_memory() -> None:
    assert load(b"Nr\xff\xff\xff\xff.") is None


def test_too_many_instructions_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_INSTRUCTIONS", 1000)
    assert "too long" in refused(b"N" * 1002 + b".")
    assert load(b"N" * 999 + b".") is None


def test_longest_pickle_ends_within_a_minute() -> None:
    started = time.monotonic()
    assert "too long" in refused(b"N" * (weights.MAX_INSTRUCTIONS + 2))
    assert time.monotonic() - started < 60


CODES = [
    getattr(pickle, name)
    for name in dir(pickle)
    if name.isupper() and isinstance(getattr(pickle, name), bytes)
]
PIECES = [
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n",
    b"K\x01", b"c__torch__\nM\n", b"X\x07\x00\x00\x00storage", b"ctorch.jit._pickle\nrestore_type_tag\n",
    b"ctorch\nSize\n", b"ctorch._utils\n_rebuild_parameter\n", b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"q\x00", b"h\x00", b"ctorch._utils\n_rebuild_tensor_v3\n", b"ctorch\nfloat16\n",
    b"ctorch.storage\nUntypedStorage\n",
]  # fmt: skip


@given(
    pieces=st.lists(st.sampled_from(PIECES + CODES) | st.binary(min_size=1, max_size=2), max_size=40),
    script=st.booleans(),
)
@settings(deadline=None, max_examples=500)
def test_random_program_loads_or_raises_one_line_error(pieces: list[bytes], script: bool) -> None:
    try:
        load(b"\x80\x02" + b"".join(pieces) + b".", script=script)
    except CheckpointError as error:
        assert "\n" not in str(error)
