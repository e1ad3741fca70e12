"""From a model and policies to slots and units, once, before training.

It never runs a step. Read `discovery` (parameters and units), `format_choice`, `splits` and
`packing` (what each parameter becomes), `arrangement` (what `attach` moves), `materialize` (values
for meta tensors), `watch` (what must not change later); `names` and `patterns` serve them all.
"""
