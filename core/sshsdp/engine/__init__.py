"""The engine: buffers, unit state machine, collectives, hooks and zero-copy gradients."""
