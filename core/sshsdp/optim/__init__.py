"""Binding torch optimizers to update parameters, and operations over all gradients."""

from sshsdp.optim.averaging import ExponentialMovingAverage

__all__ = ["ExponentialMovingAverage"]
