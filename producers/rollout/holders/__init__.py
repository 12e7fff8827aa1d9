"""Ways to hold large versions, each a `WeightHolder`: `mapped` in a file that the engine's
processes map, `streamed` in the engine's own tensors only.
"""
