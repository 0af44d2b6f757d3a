"""The passes, one file each. Imported as ``mpcompile.passes`` only."""

if __name__ != "mpcompile.passes":
    raise ImportError("import 'mpcompile.passes', not the top-level folder 'passes'")

from mpcompile.passes.assign_precision import AssignPrecision
from mpcompile.passes.bucket_allreduce import BucketAllreduce
from mpcompile.passes.cast_composites import CastComposites
from mpcompile.passes.fold_casts import FoldCasts
from mpcompile.passes.fuse_updates import FuseUpdates
from mpcompile.passes.insert_casts import InsertCasts
from mpcompile.passes.scale_loss import ScaleLoss

__all__ = [
    "AssignPrecision",
    "BucketAllreduce",
    "CastComposites",
    "FoldCasts",
    "FuseUpdates",
    "InsertCasts",
    "ScaleLoss",
]
