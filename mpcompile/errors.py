"""The errors mpcompile raises on purpose.

Each message has four parts: where, what was found, why it cannot go on, what to change. Anything
else that escapes from this package is a bug of ours, and an ``assert`` says so.
"""

from __future__ import annotations


class MpcompileError(Exception):
    """Base of every error raised on purpose, so that one ``except`` catches them all."""


class ConfigError(MpcompileError, ValueError):
    """The user's options or environment variables cannot be honoured."""


class CaptureError(MpcompileError, RuntimeError):
    """The step, or what was handed over as one, cannot be captured."""


class PassError(MpcompileError, RuntimeError):
    """A pass met a graph that it cannot rewrite."""


class GraphVerifyError(PassError):
    """A rewritten graph is malformed, or changed something that the user can see."""


class CodegenError(MpcompileError, RuntimeError):
    """A kernel cannot be generated, built or loaded."""


class SyncError(MpcompileError, RuntimeError):
    """Ranks disagree, or one of them is gone."""
