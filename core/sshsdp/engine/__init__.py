"""What a user holds: `shard` makes an `Engine`, and that delegates.

Read `engine` (the front), `build` (`shard`), `attachments` (optimizers), `steps` (from gradients to
published values), `gradient_operations` (norms and clipping), `saving` and `whole_state`
(checkpoints and state dicts).
"""
