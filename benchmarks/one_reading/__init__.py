"""NAME one_reading: all roles of a run see one model, one prompt and one set of settings."""
