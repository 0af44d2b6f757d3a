"""A plan's digest tells two plans apart."""

from __future__ import annotations

import torch

from mpcompile.distributed.plan import Bucket, BucketPlan, wire_of


def plan(*names: str, wire: torch.dtype = torch.float16, setting: str = "x: 1") -> BucketPlan:
    sizes = (4,) * len(names)
    return BucketPlan((Bucket(0, names, sizes, torch.float32, wire),), (setting,))


def test_equal_plans_have_equal_digests_in_the_range_of_int64() -> None:
    assert plan("a", "b").digest() == plan("a", "b").digest()
    assert 0 <= plan("a").digest() < 2**63


def test_names_order_wire_and_settings_change_the_digest() -> None:
    plans = [
        plan("a", "b"),
        plan("b", "a"),
        plan("a", "b", wire=torch.bfloat16),
        plan("a", "b", setting="x: 2"),
    ]
    assert len({item.digest() for item in plans}) == len(plans)


def test_bucket_counts_what_it_sends() -> None:
    (bucket,) = plan("a", "b").buckets
    assert (bucket.num_elements, bucket.wire_bytes) == (8, 16)
    assert str(bucket) == "bucket 0: float32 sent as float16: a[4] b[4]"


def test_only_float32_is_cast() -> None:
    assert wire_of(torch.float32, torch.float16) is torch.float16
    assert wire_of(torch.float64, torch.float16) is torch.float64
    assert wire_of(torch.bfloat16, torch.float16) is torch.bfloat16
