"""What modules see: parameters that are views of gather outputs, and where their gradients go.

It never knows which bytes are gathered, or when: a slot asks its space and its unit through the
small protocols in `slots`. Read `sharded` (a parameter without data), `slots` (its place and its
gradient), `zero_copy` (modules that write gradients in place), `quantized` (a parameter in MXFP8).
"""
