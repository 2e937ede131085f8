"""How the samples of an epoch are cut into batches and parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anywidth.app.data.order import BatchOrder, choose_balanced, choose_subset, hold_out
from anywidth.errors import AnywidthError
from anywidth.training.seeds import derive_seed


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_ranks_see_every_sample_once(
    samples: int, batch_size: int, world_size: int, shuffle: bool
) -> None:
    batch_size = max(batch_size, world_size)
    orders = [
        BatchOrder(samples, batch_size, shuffle=shuffle, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    seen: list[int] = []
    for step in range(len(orders[0])):
        parts = [
            order.permutation(3)[order.batch(step)][order.part(step)].tolist() for order in orders
        ]
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        is_last = step == len(orders[0]) - 1
        assert is_last or (min(sizes) > 0 and sum(sizes) == batch_size)
        seen.extend(number for part in parts for number in part)
    assert sorted(seen) == list(range(samples))
    assert shuffle or seen == sorted(seen)


@given(samples=st.integers(8, 60), share=st.integers(1, 4), world_size=st.integers(1, 2))
def test_drop_last_gives_equal_parts(samples: int, share: int, world_size: int) -> None:
    order = BatchOrder(
        samples, share * world_size, drop_last=True, rank=world_size - 1, world_size=world_size
    )
    parts = [order.part(step) for step in range(len(order))]
    assert {part.stop - part.start for part in parts} == {share}
    assert len(order) == samples // (share * world_size)


def test_orders_of_epochs_and_seeds_differ() -> None:
    orders = [
        BatchOrder(50, 5, seed=seed, shuffle=True).permutation(epoch).tolist()
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    ]
    assert len({tuple(order) for order in orders}) == 6


def test_seeds_do_not_collide_over_purposes_or_positions() -> None:
    seeds = {
        derive_seed(purpose, first, second)
        for purpose in ("order", "augment")
        for first in range(20)
        for second in range(20)
    }
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "sample"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
        ({"batch_size": 3, "world_size": 4}, "batch-size 4"),
        ({"batch_size": 7, "world_size": 2, "drop_last": True}, "batch-size 6"),
        ({"batch_size": 11, "drop_last": True}, "larger"),
    ],
)
def test_impossible_orders_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(AnywidthError, match=message):
        BatchOrder(**{"samples": 10, "batch_size": 5, **arguments})


@pytest.mark.parametrize(("epoch", "start"), [(-1, 0), (0, -1), (0, 3)])
def test_a_start_outside_the_epoch_is_refused(epoch: int, start: int) -> None:
    order = BatchOrder(10, 5)
    order.check_start(0, 2)
    with pytest.raises(AnywidthError, match="start"):
        order.check_start(epoch, start)


def test_a_subset_has_no_sample_twice() -> None:
    chosen = choose_subset(100, 40, seed=1)
    assert len(set(chosen.tolist())) == 40
    assert chosen.tolist() != sorted(chosen.tolist())
    assert torch.equal(chosen, choose_subset(100, 40, seed=1))
    assert not torch.equal(chosen, choose_subset(100, 40, seed=2))
    with pytest.raises(AnywidthError, match="100"):
        choose_subset(100, 101, seed=0)


def test_balanced_choice_takes_the_first_of_each_class() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 0])
    assert choose_balanced(labels, 3).tolist() == [0, 3, 6]
    assert choose_balanced(labels, 5).tolist() == [0, 1, 3, 4, 6]
    # Class 2 has run out: the others go on in turn.
    assert choose_balanced(labels, 6).tolist() == [0, 1, 2, 3, 4, 6]
    assert choose_balanced(labels, 8).tolist() == list(range(8))
    with pytest.raises(AnywidthError, match="9 samples"):
        choose_balanced(labels, 9)


def test_holding_out_takes_the_share_of_every_class() -> None:
    labels = torch.tensor([0] * 100 + [1] * 40 + [2] * 3)
    kept, held = hold_out(labels, 0.1, seed=0)
    assert torch.bincount(labels[held], minlength=3).tolist() == [10, 4, 0]
    assert sorted(kept.tolist() + held.tolist()) == list(range(143))
    assert held[:10].tolist() != list(range(10))
    with pytest.raises(AnywidthError, match="3 samples"):
        hold_out(torch.tensor([0, 0, 0, 1]), 0.1, seed=0)
