"""What the cast rounds off is kept per parameter, whatever bucket it lies in."""

from __future__ import annotations

import torch

from mpcompile.distributed.plan import Bucket, BucketPlan
from mpcompile.distributed.residuals import Residuals


def bucket(index: int, *members: tuple[str, int]) -> Bucket:
    names, sizes = zip(*members, strict=True)
    return Bucket(index, names, sizes, torch.float32, torch.float16)


def test_residuals_follow_parameters_into_new_buckets() -> None:
    residuals = Residuals()
    first = bucket(0, ("a", 2), ("b", 1))
    residuals.lay_out(BucketPlan((first,)))
    residuals.of(first, torch.empty(3)).copy_(torch.tensor([1.0, 2.0, 3.0]))
    one, other = bucket(0, ("b", 1)), bucket(1, ("a", 2))
    residuals.lay_out(BucketPlan((one, other)))
    assert residuals.of(one, torch.empty(1)).tolist() == [3.0]
    assert residuals.of(other, torch.empty(2)).tolist() == [1.0, 2.0]


def test_state_is_a_copy_that_another_object_takes() -> None:
    residuals = Residuals()
    only = bucket(0, ("a", 2))
    residuals.lay_out(BucketPlan((only,)))
    flat = residuals.of(only, torch.empty(2))
    flat.fill_(1.0)
    state = residuals.state()
    flat.fill_(5.0)
    again = Residuals()
    again.load(state)
    again.lay_out(BucketPlan((only,)))
    assert again.of(only, torch.empty(2)).tolist() == [1.0, 1.0]
