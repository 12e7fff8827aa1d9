"""The objectives of the trainer restated in float64 from their papers (`reference`), and updates
whose losses and gradients are compared with them (`updates`).
"""
