"""Binding torch optimizers to update parameters, and operations over all gradients."""
