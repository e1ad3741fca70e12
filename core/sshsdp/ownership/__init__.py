"""Whole matrices, each on one rank, for optimizers that cannot work on pieces.

It never knows which optimizer wants them. Read `fragments` (which part of a matrix lies in which
shard), `owned_space` (a space whose update shard is matrices), `exchange` (gradients to owners,
values back).
"""
