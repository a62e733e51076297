"""AOT autograd with compilers of one's own: forward, backward, partition, decompositions."""
