"""The fuzz targets for a few seconds: seeds, mutations of them, and arbitrary bytes; `make fuzz` goes on for longer."""

import random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target, seeds

MUTATIONS = 1500
# Lengths, signs and types lie at these; a byte drawn at random seldom hits them.
_TELLING = bytes.fromhex("00 01 7f 80 81 90 91 a0 c0 c1 c3 c7 ca cb cf d3 d9 db dd df ff")

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """`data` after one to four changes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                changed[at : at + 1] = bytes([draw.choice(_TELLING)])
            case 2:
                del changed[at : at + draw.randint(1, 8)]
            case 3:
                changed[at:at] = changed[at : at + draw.randint(1, 32)]
            case _:
                other = draw.choice(seeds())
                changed[at:at] = other[: draw.randint(1, 64)]
    return bytes(changed)


@every_target
def test_seeds_and_their_mutations_keep_the_invariants(target: Target) -> None:
    draw = random.Random(7)
    known = seeds()
    for data in known:
        target(data)
    for _ in range(MUTATIONS):
        data = mutated(draw.choice(known), draw)
        try:
            target(data)
        except BaseException as error:
            error.add_note(f"input: {data!r}")
            raise


@every_target
@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=64)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=4)
        | st.binary(max_size=4),
        lambda plain: (
            st.lists(plain, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), plain, max_size=4)
        ),
    ).map(msgpack.packb)
)
def test_arbitrary_bytes_and_values_keep_the_invariants(target: Target, data: bytes) -> None:
    target(data)
