"""Distributed checkpoints: torch.distributed.checkpoint directories under the model's own names."""
