"""Address spaces at work: runtime shard, update shard, gather output and reduce input of each.

It never knows the model's structure, or who asks for a gather. Read `space` (the whole of one),
`flat_buffer` (memory that comes and goes under views), `runtime_side` with `dense_side` and
`mxfp8_side` (the formats' bytes), `space_format` (which side is made), `unit` (spaces that are
gathered together).
"""
