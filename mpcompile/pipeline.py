"""The pipeline: which passes there are, in the order in which they run."""

from __future__ import annotations

from mpcompile.config import Config
from mpcompile.pass_base import GraphPass
from mpcompile.pass_manager import PassManager
from mpcompile.passes import (
    AssignPrecision,
    BucketAllreduce,
    CastComposites,
    FoldCasts,
    FuseUpdates,
    InsertCasts,
    ScaleLoss,
)

PIPELINE: tuple[GraphPass, ...] = (
    CastComposites(),
    AssignPrecision(),
    InsertCasts(),
    ScaleLoss(),
    FoldCasts(),
    BucketAllreduce(),
    FuseUpdates(),
)


def build_manager(config: Config) -> PassManager:
    """Return a manager that runs the pipeline with the toggles of ``config``."""
    return PassManager(PIPELINE, config)
