"""Optimizers, what binds them to update parameters, and operations over all gradients."""

from sshsdp.optim.averaging import ExponentialMovingAverage
from sshsdp.optim.choosing import muon_with_adamw
from sshsdp.optim.muon import Muon

__all__ = ["ExponentialMovingAverage", "Muon", "muon_with_adamw"]
