"""The device code. Its modules need the ``nki`` package; ``neuron.nki.load`` imports them."""
