"""The engine without a model: it keeps the whole engine contract on drawn lengths, at the pace of a
roofline.

Nothing is imported here, so that the simulator can import `roofline` and `lengths` without torch.
"""
