"""What a user of AWS Trainium runs: check, compile and run the engine's compiled steps.

May import ``dcpjax``; ``dcpjax`` never imports it. See ``neuron/README.md``.
"""
