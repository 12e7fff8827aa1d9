"""Object store and archive: NAMEs s3 and archive."""
