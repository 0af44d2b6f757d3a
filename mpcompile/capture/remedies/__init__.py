"""What keeps real steps from being one graph although it need not: one remedy a module.

Each is installed once and does nothing except while a step of ours is traced whole in the same
thread. Without it the step would be right too, in regions.
"""

from __future__ import annotations

from mpcompile.capture.remedies import logger_calls


def install() -> None:
    """Install all remedies; once."""
    logger_calls.install()
