"""What keeps real steps from being one graph although it need not: one remedy a module.

Each is installed once and does nothing except while a step of ours is traced in the same thread,
most of them only while it is traced whole. Without it the step would be right too, in regions.
"""

from __future__ import annotations

from mpcompile.capture.remedies import (
    activation_grads,
    causal_mask,
    ctc_loss,
    cudnn_flags,
    growing_lists,
    logger_calls,
    math_functions,
    output_capturing,
    raising_branches,
    recurrent_layers,
    repeated_masks,
)

_OF_TORCH = (
    *(activation_grads, causal_mask, ctc_loss, cudnn_flags),
    *(growing_lists, logger_calls, math_functions, raising_branches, recurrent_layers),
    repeated_masks,
)


def install() -> None:
    """Install all remedies; once."""
    for remedy in _OF_TORCH:
        remedy.install()


def install_for_imported() -> None:
    """Install remedies for other packages as far as they are imported; cheap, before each call."""
    output_capturing.install()
