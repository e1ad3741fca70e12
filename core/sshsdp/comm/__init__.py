"""How ranks speak: process groups of a mesh, collectives, and agreements before anything moves.

It never knows what the bytes mean. Read `collectives` (the only callers of torch.distributed's
data collectives), `topology` (which groups there are), `agreement` and `rendezvous` (a rank that
fails or differs is named on every rank, and nobody hangs).
"""
