"""The engine without a model: the whole contract on drawn lengths, paced by a roofline.

Nothing is imported here, so that the simulator takes `roofline` and `lengths` without torch.
"""
