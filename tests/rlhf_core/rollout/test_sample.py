import hashlib

import pytest

from rlhf_core.rollout.sample import sample_seed


def test_a_seed_is_the_first_63_bits_of_the_hash_of_its_parts():
    packed = b"".join(number.to_bytes(8, "big") for number in (7, 40, 3, 12))
    expected = int(hashlib.sha256(packed).hexdigest()[:16], 16) // 2
    assert sample_seed(7, 40, 3, 12) == expected


def test_each_part_changes_the_seed_and_no_two_of_many_are_equal():
    seeds = {sample_seed(s, t, p, i) for s in range(3) for t in range(10) for p in range(10) for i in range(10)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("swapped", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_parts_are_not_interchangeable(swapped: tuple[int, int, int, int]):
    others = {sample_seed(*p) for p in [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)] if p != swapped}
    assert sample_seed(*swapped) not in others
