"""A long run without a model: what of it grows (`soak`)."""
