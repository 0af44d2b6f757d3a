"""Gradients between ranks: bucket arithmetic, the process group that applies it, checks of both."""
