"""Being on call: whether each concern of a run raises its alert."""
